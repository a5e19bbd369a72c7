"""Writes text with a trained model: python -m PACKAGE.sample CHECKPOINT ["how it begins"]."""

import sys

import torch
from shardlight.framework.data import ByteTokenizer
from torch import Tensor, nn

from .model import LanguageModel


@torch.no_grad()
def sample(model: nn.Module, tokens_BT: Tensor, length: int, temperature: float = 0.8, context: int = 128) -> Tensor:
    """Continues (B, T) tokens by `length` more, each drawn from what the model expects; returns (B, T + length).

    Args:
        model: from tokens to logits.
        tokens_BT: how it begins; at least one token.
        length: tokens to add.
        temperature: 1: as the model expects; lower: likelier ones; 0: the likeliest.
        context: so many of the last tokens are shown to the model; as many as it was trained with.
    """
    for _ in range(length):
        logits_BV = model(tokens_BT[:, -context:])[:, -1]
        if temperature:
            next_B1 = torch.multinomial((logits_BV / temperature).softmax(-1), 1)
        else:
            next_B1 = logits_BV.argmax(-1, keepdim=True)
        tokens_BT = torch.cat((tokens_BT, next_B1), dim=1)
    return tokens_BT


def main() -> None:
    """Prints 400 bytes."""
    module = LanguageModel.load_from_checkpoint(sys.argv[1]).eval()
    start = (sys.argv[2] if len(sys.argv) > 2 else "def ").encode()
    tokens = sample(module.model, torch.tensor([list(start)]), 400)
    print(ByteTokenizer().decode(tokens[0]))


if __name__ == "__main__":
    main()
