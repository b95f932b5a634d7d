"""The models and train steps in torch (gloo) for `worker.py`, with the weights and batches of `models.py`.

| name | what |
|---|---|
| `DDP`, `DDP fused` | `DistributedDataParallel`, Adam; `Adam(fused=True)` |
| `ZeRO` | `DistributedDataParallel` with `ZeroRedundancyOptimizer` |
| `FSDP2` | `fully_shard` of each layer and of the whole |
| `plain`, `plain x2` | one rank, with its batch or the batches of both |
"""

from __future__ import annotations

from typing import Any

import models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from worker import RANK, SIZE, Variant


def _parameter(x: Any) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(x.copy()))


def _linear(layer: dict[str, Any]) -> nn.Linear:
    fan_in, fan_out = layer["w"].shape
    module = nn.Linear(fan_in, fan_out)
    module.weight, module.bias = _parameter(layer["w"].T), _parameter(layer["b"])
    return module


def mlp(params: list[Any]) -> nn.Module:
    """Return a multi-layer perceptron."""
    layers: list[nn.Module] = []
    for layer in params:
        layers += [_linear(layer), nn.GELU(approximate="tanh")]
    return nn.Sequential(*layers[:-1])


def lenet(params: list[Any]) -> nn.Module:
    """Return a LeNet for images with channels first."""

    def convolution(layer: dict[str, Any], padding: int) -> nn.Conv2d:
        height, width, fan_in, fan_out = layer["w"].shape
        module = nn.Conv2d(fan_in, fan_out, (height, width), padding=padding)
        module.weight, module.bias = _parameter(layer["w"].transpose(3, 2, 0, 1)), _parameter(layer["b"])
        return module

    first, second, dense, *rest = params
    # JAX flattens (height, width, channels), torch (channels, height, width).
    rows = dense["w"].reshape(5, 5, 16, -1).transpose(2, 0, 1, 3).reshape(400, -1)
    layers: list[nn.Module] = [convolution(first, 2), nn.ReLU(), nn.MaxPool2d(2), convolution(second, 0), nn.ReLU()]
    layers += [nn.MaxPool2d(2), nn.Flatten(), _linear({"w": rows, "b": dense["b"]})]
    for layer in rest:
        layers += [nn.ReLU(), _linear(layer)]
    return nn.Sequential(*layers)


class Block(nn.Module):
    """A layer of the GPT."""

    def __init__(self, params: dict[str, Any], heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = _parameter(params["norm1"]), _parameter(params["norm2"])
        self.qkv, self.out = _parameter(params["qkv"].T), _parameter(params["out"].T)
        self.up, self.down = _parameter(params["up"].T), _parameter(params["down"].T)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention, then the two dense layers."""
        b, t, d = x.shape
        qkv = F.linear(F.rms_norm(x, (d,), self.norm1, 1e-6), self.qkv).view(b, t, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(mixed.transpose(1, 2).reshape(b, t, d), self.out)
        hidden = F.gelu(F.linear(F.rms_norm(x, (d,), self.norm2, 1e-6), self.up), approximate="tanh")
        return x + F.linear(hidden, self.down)


class GPT(nn.Module):
    """A byte-level GPT with a tied embedding."""

    def __init__(self, params: dict[str, Any], heads: int):
        super().__init__()
        self.embed, self.place = _parameter(params["embed"]), _parameter(params["place"])
        self.layers = nn.ModuleList([Block(p, heads) for p in params["layers"]])
        self.norm = _parameter(params["norm"])

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = F.embedding(tokens, self.embed) + self.place
        for layer in self.layers:
            x = layer(x)
        return F.linear(F.rms_norm(x, x.shape[-1:], self.norm, 1e-6), self.embed)


class Steps:
    """The steps of one rank for one model.

    Args:
      model: its name.
    """

    def __init__(self, model: str):
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)  # as XLA does
        if SIZE > 1:
            dist.init_process_group("gloo", rank=RANK, world_size=SIZE)  # at MASTER_ADDR and MASTER_PORT
        self.model = models.find(model)

    def __call__(self, name: str) -> Variant:
        """Return the variant with this name."""
        inputs, targets = self._batch([0, 1] if name.endswith(" x2") else [RANK])
        module = self._module()
        if name == "FSDP2":
            layers = module.layers if isinstance(module, GPT) else module.children()
            mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
            for layer in [x for x in layers if any(True for _ in x.parameters())]:
                fully_shard(layer, mesh=mesh)
            fully_shard(module, mesh=mesh)
        elif SIZE > 1:
            module = DistributedDataParallel(module)
        kind, rate = torch.optim.Adam, models.LEARNING_RATE
        if name == "ZeRO":
            optimizer: Any = ZeroRedundancyOptimizer(module.parameters(), kind, lr=rate)
        else:
            optimizer = kind(module.parameters(), lr=rate, fused=True if name.endswith("fused") else None)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(module(inputs).flatten(0, -2), targets.flatten())
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Variant(step)

    def _module(self) -> Any:
        params = models.init(self.model)
        match self.model:
            case models.Mlp():
                return mlp(params)
            case models.LeNet():
                return lenet(params)
            case models.Gpt(heads=heads):
                return GPT(params, heads)

    def _batch(self, ranks: list[int]) -> tuple[Tensor, Tensor]:
        inputs, targets = models.batches(self.model, ranks)
        if isinstance(self.model, models.LeNet):
            inputs = inputs.transpose(0, 3, 1, 2).copy()
        return torch.from_numpy(inputs), torch.from_numpy(targets).long()
