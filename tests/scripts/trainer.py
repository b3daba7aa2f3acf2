"""A script of transformers' Trainer, which goes on from the newest checkpoint in its folder."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Tokens(torch.utils.data.Dataset):
    """Rows of tokens, each a function of its index."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Steps(TrainerCallback):
    """Prints each step's loss, as logged, and pauses beside it."""

    def __init__(self, pause: float) -> None:
        self.pause = pause

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        if state.is_world_process_zero and "loss" in (logs or {}):
            print(
                f"step {state.global_step - 1} world {args.world_size} loss {float(logs['loss']):.6f}",
                flush=True,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        time.sleep(self.pause)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--folder", required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=options.folder,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            save_steps=options.save_every,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Tokens(),
        callbacks=[Steps(options.pause)],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(options.folder))


if __name__ == "__main__":
    main()
