"""vLLM's OffloadingConnector on a CPU. Its copies run at once, instead of on a CUDA stream.

A `kv_connector_extra_config` selects it with `spec_name` and `spec_module_path`. Lookup, eviction and the choice of
blocks are vLLM's own.
"""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class _Done:
    """A stream and an event whose work has ended."""

    def __init__(self, **_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Done) -> float:
        del end
        return 1.0

    def _nothing(self, *_: Any) -> None:
        pass

    record = synchronize = wait = wait_event = wait_stream = _nothing


class _Replaced:
    """A module with some attributes replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _OnDevice(torch.Tensor):
    is_cuda = property(lambda _: True)  # type: ignore[assignment]


def _copy(sources: Any, targets: Any, sizes: Any, **_: Any) -> None:
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


_module: Any = gpu_worker
_module.current_platform = _Replaced(
    gpu_worker.current_platform,
    Stream=_Done,
    current_stream=_Done,
    stream=contextlib.nullcontext,
)
_module.torch = _Replaced(torch, Event=_Done)
_module.ops = SimpleNamespace(swap_blocks_batch=_copy)


class CPUOffloadingSpecOnCPU(CPUOffloadingSpec):
    """The specification without the check for a GPU."""

    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            for each in kv_caches.tensors:
                each.tensor = each.tensor.as_subclass(_OnDevice)
            self._worker = self.create_worker(kv_caches)
        return self._worker
