"""What draws on a device look at beside the logits: lines of tokens said, biases and masks, at fixed places.

Written on the stream, in the order of the steps: a captured step finds them where they were.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.sampling.triton_rows import MAX_BIASES, NO_BIAS
from shared.engine.device_stream import DeviceStream
from shared.engine.sampling_lines import Biases, LineText


class DeviceSampling:
    """Lines for the sequences of one worker.

    Args:
        num_lines: most sequences of a step.
    """

    def __init__(self, num_lines: int, vocab_size: int, device: torch.device) -> None:
        words = mask_words(vocab_size)

        def zeros(columns: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(num_lines, columns, dtype=dtype, device=device)

        self.counts = zeros(vocab_size)  # how often a token was put out
        self.prompts = zeros(words)  # bit i % 32 of word i / 32 for tokens of the prompt
        self.bias_ids = zeros(MAX_BIASES)
        self.bias_values = zeros(MAX_BIASES, torch.float32)
        self.masks = zeros(words)  # of a step, line by line: bit set = allowed

    def write(self, text: LineText, stream: DeviceStream) -> None:
        """Write a line, behind the steps launched before and ahead of those launched later."""
        if text.said is not None:
            self._write_tokens(text.line, *text.said, stream)
        if text.biases is not None:
            self._write_biases(text.line, text.biases, stream)

    def _write_tokens(self, line: int, prompt: tuple[int, ...], output: tuple[int, ...], stream: DeviceStream) -> None:
        words = self.prompts.shape[1]
        bits = np.zeros(words * 32, np.uint8)
        bits[list(prompt)] = 1
        packed = np.packbits(bits, bitorder="little").view(np.int32)
        sent = stream.upload(np.concatenate((packed, np.array(output, np.int32))))
        self.prompts[line].copy_(sent[:words])
        counts = self.counts[line].zero_()
        if output:
            counts.index_add_(0, sent[words:], torch.ones_like(sent[words:]))

    def _write_biases(self, line: int, biases: Biases, stream: DeviceStream) -> None:
        ids, values = np.full(MAX_BIASES, NO_BIAS, np.int32), np.zeros(MAX_BIASES, np.float32)
        ids[: len(biases)] = [token_id for token_id, _ in biases]
        values[: len(biases)] = [value for _, value in biases]
        sent = stream.upload(np.concatenate((ids, values.view(np.int32))))
        self.bias_ids[line].copy_(sent[:MAX_BIASES])
        self.bias_values[line].copy_(sent[MAX_BIASES:].view(torch.float32))

    def write_masks(self, bits: npt.NDArray[np.uint32], stream: DeviceStream) -> None:
        """The masks of a step's rows: [rows, words], into the leading lines."""
        self.masks[: bits.shape[0]].copy_(stream.upload(bits.reshape(-1).view(np.int32)).view(bits.shape))


def mask_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // 32)
