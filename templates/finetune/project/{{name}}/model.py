"""A causal language model of transformers, trained on the responses to instructions: nothing about strategies."""

import math

import transformers
from shardlight.framework import TrainingModule
from torch import Tensor, nn

from .tokenizer import END, PAD, VOCAB_SIZE, model_folder


def fresh_model(width: int, depth: int, heads: int) -> nn.Module:
    """A small Llama with random weights, for the byte tokenizer."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=END,
        eos_token_id=END,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


class Chat(TrainingModule):
    """Trains a model, or adapters of low rank in it, to predict the tokens of responses.

    Args:
        model: the folder to open with from_pretrained; None: a fresh, small one.
        lora: whether only adapters are trained (Hu et al. 2021, LoRA).
        lora_rank: of the adapters.
        width: of a fresh model.
        depth: layers of a fresh model.
        heads: of a fresh model.
    """

    constraints = ("width % heads == 0", "depth >= 1", "lora_rank >= 1")  # of the arguments, for the check

    def __init__(
        self,
        model: str | None = None,
        lora: bool = False,
        lora_rank: int = 8,
        width: int = 128,
        depth: int = 3,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if model is None:
            self.model = fresh_model(width, depth, heads)
        else:
            transformers.utils.logging.disable_progress_bar()  # it would show one for each process
            kind = transformers.AutoModelForCausalLM
            self.model = kind.from_pretrained(model_folder(model), local_files_only=True, dtype="float32").train()
        if lora:
            import peft  # here: it takes seconds, and only who trains adapters needs it

            config = peft.LoraConfig(
                task_type="CAUSAL_LM", r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear"
            )
            self.model = peft.get_peft_model(self.model, config)

    def logits_and_labels(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Scores (B, T - 1, V) for the token after each position but the last, and that token, -100 in prompts."""
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return logits[:, :-1], batch["labels"][:, 1:]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Returns the mean cross entropy over the tokens of all responses, exact over ranks and accumulation."""
        loss = self.token_loss(*self.logits_and_labels(batch))
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Logs the loss, bits per byte of the responses, and the share of their tokens that is the likeliest one."""
        logits, labels = self.logits_and_labels(batch)
        loss = self.token_loss(logits, labels)
        counts = labels != -100
        self.log("val/loss", loss)
        bits = loss.detach() * counts.sum() / math.log(2)
        self.log("val/bpb", self.weighted(bits, batch["bytes"].sum()), prog_bar=True)
        right = ((logits.argmax(-1) == labels) & counts).float().sum()
        self.log("val/accuracy", self.weighted(right, counts.sum()))
