"""Answers an instruction with a trained model: python -m PACKAGE.answer CHECKPOINT "What does str.upper do?"."""

import sys

import torch

from .model import Chat
from .tokenizer import load_tokenizer, prompt


@torch.no_grad()
def answer(module: Chat, instruction: str, max_new_tokens: int = 200) -> str:
    """Returns the likeliest response, token by token."""
    tokenizer = load_tokenizer(module.hparams["model"])
    asked = torch.tensor([prompt(tokenizer, instruction)])
    tokens = module.model.generate(
        input_ids=asked,
        attention_mask=torch.ones_like(asked),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    return tokenizer.decode(tokens[0, asked.shape[1] :], skip_special_tokens=True)


def main() -> None:
    """Prints the answers to the instructions on the command line."""
    module = Chat.load_from_checkpoint(sys.argv[1]).eval()
    for instruction in sys.argv[2:]:
        print(answer(module, instruction))


if __name__ == "__main__":
    main()
