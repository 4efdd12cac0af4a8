"""The same language model and training step in eager PyTorch, for comparison.

Only `train.benchmark` imports this, and only where PyTorch is installed (the extra
`peers`). It copies the parameters of `models.transformer.CausalLM`, so that the logits
of both can be compared before either is timed.
"""

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from models import config as model_config
from train import config as config_lib
from train.text import data

EPSILON = 1e-6  # of flax's RMSNorm


class CausalLM(torch.nn.Module):
    """Pre-norm decoder with rotary positions, tied embeddings and no biases."""

    def __init__(self, config: model_config.CausalLMConfig, params: dict[str, Any]):
        """Copies the parameters; kernels keep flax's layout [inputs, outputs]."""
        super().__init__()
        supported = dict(
            num_kv_heads=None,
            positions="rotary",
            mixers="softmax",
            scale=None,
            use_bias=False,
            tie_embeddings=True,
            dropout_rate=0.0,
            dtype="float32",
        )
        for name, value in supported.items():
            if getattr(config, name) != value:
                raise ValueError(
                    f"the PyTorch peer needs model.{name}={value!r}, "
                    f"got {getattr(config, name)!r}"
                )
        self.config = config
        width = config.width
        self.embedding = _parameter(params["token_embedding"]["embedding"])
        self.final_norm = _parameter(params["final_norm"]["scale"])
        self.blocks = torch.nn.ModuleList()
        for i in range(config.num_layers):
            block, layer = params[f"blocks_{i}"], torch.nn.Module()
            layer.mixer_norm = _parameter(block["mixer_norm"]["scale"])
            kernels = [
                np.reshape(block["mixer"][name]["kernel"], (width, width))
                for name in ("query", "key", "value")
            ]
            layer.qkv = _parameter(np.concatenate(kernels, axis=1))
            layer.out = _parameter(
                np.reshape(block["mixer"]["out"]["kernel"], (width, width))
            )
            layer.mlp_norm = _parameter(block["mlp_norm"]["scale"])
            layer.up = _parameter(block["mlp"]["up"]["kernel"])
            layer.down = _parameter(block["mlp"]["down"]["kernel"])
            self.blocks.append(layer)
        half = width // config.num_heads // 2
        periods = 10000.0 ** (np.arange(half) / half)
        angles = np.arange(config.context)[:, None] / periods
        self.register_buffer("cos", torch.tensor(np.cos(angles), dtype=torch.float32))
        self.register_buffer("sin", torch.tensor(np.sin(angles), dtype=torch.float32))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B T V] of tokens [B T]."""
        batch, length = tokens.shape
        heads, width = self.config.num_heads, self.config.width

        def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return functional.rms_norm(x, (width,), scale, EPSILON)

        x = functional.embedding(tokens, self.embedding)
        for block in self.blocks:
            projected = norm(x, block.mixer_norm) @ block.qkv
            query, key, value = (
                y.reshape(batch, length, heads, -1).transpose(1, 2)
                for y in projected.chunk(3, dim=-1)
            )
            h = functional.scaled_dot_product_attention(
                self._rotary(query), self._rotary(key), value, is_causal=True
            )
            x = x + h.transpose(1, 2).reshape(batch, length, width) @ block.out
            h = functional.gelu(norm(x, block.mlp_norm) @ block.up, approximate="tanh")
            x = x + h @ block.down
        return norm(x, self.final_norm) @ self.embedding.T

    def _rotary(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Trainer:
    """A training step: batch, loss, gradients, clipping, AdamW."""

    def __init__(
        self, model: CausalLM, config: config_lib.Config, corpus: data.Corpus
    ) -> None:
        """Sets up the optimiser, with weight decay on matrices only."""
        if config.train.accumulation != 1:
            raise ValueError(
                "the PyTorch peer needs train.accumulation=1, "
                f"got {config.train.accumulation}"
            )
        self.model, self.config = model, config
        self.tokens = torch.tensor(corpus.train, dtype=torch.int64)
        decay = config.optimizer.weight_decay
        matrices = [p for p in model.parameters() if p.ndim == 2]
        vectors = [p for p in model.parameters() if p.ndim != 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.optimizer.peak_lr,
            betas=(config.optimizer.b1, config.optimizer.b2),
        )
        self.generator = torch.Generator().manual_seed(config.seed)

    def step(self) -> float:
        """One update; returns the loss in nats per token."""
        context = self.config.model.context
        starts = torch.randint(
            len(self.tokens) - context,
            (self.config.train.batch_size, 1),
            generator=self.generator,
        )
        batch = self.tokens[starts + torch.arange(context + 1)]
        logits = self.model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_norm = self.config.optimizer.clip_norm
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm)
        self.optimizer.step()
        return loss.item()


def logits(model: CausalLM, tokens: np.ndarray) -> np.ndarray:
    """Computes logits without gradients, as NumPy."""
    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.int64)).numpy()


def version() -> str:
    """Returns PyTorch's version and the number of its threads."""
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads"


def _parameter(array: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(np.array(array, np.float32)))
