"""hvdlite for the Trainer of Hugging Face Transformers::

args = HvdliteTrainingArguments("out", per_device_train_batch_size=8)
HvdliteTrainer(model, args, train_dataset=dataset).train()

started with hvdliterun.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

import hvdlite.torch as hvd
from hvdlite.integrations.accelerate import HvdliteAccelerator, launcher_hidden, use_ranks

__all__ = ["HvdliteTrainer", "HvdliteTrainingArguments"]


class HvdliteTrainingArguments(TrainingArguments):
    """TrainingArguments whose world is that of hvdlite. Calls hvd.init()."""

    _n_gpu: Any

    @cached_property
    def _setup_devices(self) -> torch.device:
        with launcher_hidden():
            device: torch.device = super()._setup_devices
        use_ranks(cpu=self.use_cpu)
        self._n_gpu = min(self._n_gpu, 1)  # several would be used by one process, with DataParallel
        return device

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        state = self.distributed_state
        with state.local_main_process_first() if local else state.main_process_first():
            yield


class HvdliteTrainer(Trainer):
    """A Trainer that trains on all ranks of hvdlite, each with its part of every batch.

    It starts with rank 0's model, clips and logs averages, evaluates on all ranks, and lets rank 0 save.

    Raises:
        TypeError: ``args`` are no `HvdliteTrainingArguments`.
    """

    def create_accelerator_and_postprocess(self) -> None:
        if not isinstance(self.args, HvdliteTrainingArguments):
            raise TypeError(f"args is a {type(self.args).__name__}; pass HvdliteTrainingArguments to HvdliteTrainer")
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = HvdliteAccelerator  # a Trainer makes its own
        self.accelerator.share_data()
        self.gather_function = partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        for name in ("loss", "train_loss"):  # those that each rank knows of its own part only
            if name in logs:
                logs[name] = hvd.allreduce(torch.tensor(logs[name], dtype=torch.float64, device="cpu")).item()
        super().log(logs, *args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        output = super().train(*args, **kwargs)
        return output._replace(training_loss=output.metrics["train_loss"])
