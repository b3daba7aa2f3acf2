"""Models that ship with elasticd, each a plain nn.Module with the description that elasticd needs beside it."""

from elasticd.models.decoder import Decoder, DecoderConfig, next_token_loss

__all__ = ["Decoder", "DecoderConfig", "next_token_loss"]
