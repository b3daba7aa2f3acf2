"""Trains a small vision-language model of transformers on the images that come with scikit-learn.

    pip install '.[hf]' scikit-learn
    elasticd run --job vlm --nnodes 2 --devices 2 examples/train_vlm.py

The model is a Qwen3-VL, made from a configuration. It reads digits and pieces of two photographs and says what
they show; some samples have no image, others up to three. The encoder and the language model are two modules,
each with a layout of its own. `--frozen` trains the language model alone. `--out FOLDER` writes what
`from_pretrained` loads. As `python examples/train_vlm.py` it trains in one process, to the same losses.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

import elasticd
from elasticd.models.huggingface import sample_of

PATCH, MERGE = 2, 2  # pixels of a patch's side; patches of a side that are one row for the language model
WORDS = ["<pad>", "<begin>", "<image>", "<video>", "<images>", "</images>", "shows", "nothing", *"0123456789"]
WORDS += ["china", "flower"]
TOKEN = {word: token for token, word in enumerate(WORDS)}


def make_model(dtype: torch.dtype) -> Qwen3VLForConditionalGeneration:
    """A model of 3 layers beside an encoder of 2, with random weights."""
    text = {"vocab_size": len(WORDS), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": TOKEN["<pad>"]}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64}
    vision |= {"patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 1}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=TOKEN["<image>"],
        video_token_id=TOKEN["<video>"],
        vision_start_token_id=TOKEN["<images>"],
        vision_end_token_id=TOKEN["</images>"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)  # every rank makes the same model
    return Qwen3VLForConditionalGeneration(config).to(dtype)


class Pictures:
    """Samples of up to three images, and the words of what they show."""

    def __init__(self, size: int = 960) -> None:
        from sklearn.datasets import load_digits, load_sample_images

        digits, photographs = load_digits(), load_sample_images()
        self._digits, self._shown = torch.tensor(digits.images) / 16, digits.target.tolist()
        self._photographs = [torch.tensor(each).permute(2, 0, 1) / 255 for each in photographs.images]
        self.counts = {"images": [(0, 1, 2, 3, 1)[index % 5] for index in range(size)]}

    def __len__(self) -> int:
        return len(self.counts["images"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return sample_of(self.encoded(index))

    def encoded(self, index: int) -> dict[str, Tensor]:
        """A sample as a processor gives it."""
        shown = [self._image(index, number) for number in range(self.counts["images"][index])]
        return encoded([image for image, _ in shown], [word for _, word in shown] or ["nothing"])

    def tokens(self, index: int) -> int:
        """The tokens of a sample, without its images being made."""
        count, rows = self.counts["images"][index], 24 if index % 5 == 4 else 4
        return 2 + count * (2 + rows) + max(1, count)

    def _image(self, index: int, number: int) -> tuple[Tensor, str]:
        """An image [3, height, width], and its word."""
        if index % 5 == 4:
            which, (row, column) = index // 5 % 2, (index // 10 % 17, index // 170 % 25)
            piece = self._photographs[which][:, 24 * row : 24 * row + 16, 24 * column : 24 * column + 24]
            return piece, ("china", "flower")[which]
        digit = (7 * index + number) % len(self._shown)
        return self._digits[digit].expand(3, 8, 8), str(self._shown[digit])


def encoded(images: list[Tensor], words: list[str]) -> dict[str, Tensor]:
    """What a processor of transformers makes of images and their text, in the place of a pretrained one."""
    ids, pixels, grids = [TOKEN["<begin>"]], [], []
    for image in images:
        height, width = (side // PATCH for side in image.shape[1:])
        ids += [TOKEN["<images>"], *[TOKEN["<image>"]] * (height * width // MERGE**2), TOKEN["</images>"]]
        patches = image.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)  # [3, height, width, PATCH, PATCH]
        blocks = patches.unflatten(2, (-1, MERGE)).unflatten(1, (-1, MERGE))  # patches of a row lie together
        pixels.append(blocks.permute(1, 3, 2, 4, 0, 5, 6).reshape(height * width, -1))
        grids.append([1, height, width])
    prompt = [*ids, TOKEN["shows"]]
    answer = [TOKEN[word] for word in words]
    made = {"input_ids": torch.tensor([prompt + answer])}
    made["labels"] = torch.tensor([[-100] * len(prompt) + answer])
    if images:
        made |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}
    return made


def make_job(options: argparse.Namespace) -> elasticd.Job:
    model = make_model(getattr(torch, options.dtype))
    return elasticd.Job(
        model=elasticd.from_hf(model, frozen=["vision.*"] if options.frozen else []),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        dataset=Pictures(),
        global_batch=options.batch,
        checkpointing=elasticd.CheckpointingOptions(snapshot_every=options.snapshot_every),
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--steps", type=int, default=200)
    made.add_argument("--batch", type=int, default=16, help="samples of a step")
    made.add_argument("--snapshot-every", type=int, default=20, help="steps, for a device that dies alone")
    made.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    made.add_argument("--frozen", action="store_true", help="the encoder is not trained")
    made.add_argument("--out", metavar="FOLDER")
    return made


def main() -> None:
    options = parser().parse_args()
    job = make_job(options)
    for step in job.steps(options.steps):
        if job.rank == 0:
            print(f"step {step.index}: loss {step.loss:.4f}")
    if options.out:
        job.save_pretrained(options.out)


if __name__ == "__main__":
    main()
