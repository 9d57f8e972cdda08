"""Launched by test_lightning.py: trains with every feature that it compares, and prints what came out as JSON.

lightning_job.py LIBRARY DIRECTORY [SCENARIO...]
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hvdlite.torch as hvd
from small_problem import Rows, flat, loss_of, network

library, directory = sys.argv[1], Path(sys.argv[2])
pl: Any = importlib.import_module(library)
module = "lightning" if library == "lightning.pytorch" else library
integration = importlib.import_module(f"hvdlite.integrations.{module}")
warnings.simplefilter("ignore")  # of Lightning, about loggers and workers
hvd.init()


class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, make: Callable[[Any], Any], **options: Any) -> None:
        super().__init__()
        self.net = network(hvd.rank(), **options)  # only rank 0's is to count
        self.make = make

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> Any:
        return self.make(self.net.parameters())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trainer_of(**options: Any) -> Any:
    defaults = {
        "strategy": integration.HvdliteStrategy(),
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": directory,
    }
    return pl.Trainer(**(defaults | options))


def loader(batch_size: int = 4, rows: int = 24) -> Any:
    return torch.utils.data.DataLoader(Rows(rows), batch_size=batch_size)


def scenario_sgd() -> Any:
    model = Net(sgd)
    trainer_of().fit(model, loader())
    return flat(model.net)


def scenario_registered_name() -> Any:
    model = Net(sgd)
    trainer_of(strategy="hvdlite").fit(model, loader())
    return flat(model.net)


def scenario_adamw() -> Any:
    """Clipping, accumulation with a shorter last window, a scheduler."""

    def make(parameters: Any) -> Any:
        optimizer = torch.optim.AdamW(parameters, lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    class Watching(Net):
        seen: list[float]

        def on_after_backward(self) -> None:
            if not self.trainer.fit_loop._should_accumulate():
                self.seen.append(self.net[0].weight.grad.norm().item())

    model = Watching(make)
    model.seen = []
    trainer_of(accumulate_grad_batches=2, gradient_clip_val=0.1).fit(model, loader())
    return {"weights": flat(model.net), "norms": model.seen}


def scenario_lbfgs() -> Any:
    model = Net(lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=4))
    trainer_of().fit(model, loader())
    return flat(model.net)


def scenario_batch_norm() -> Any:
    model = Net(sgd, batch_norm=True)
    trainer_of(sync_batchnorm=True).fit(model, loader())
    return flat(model.net)


def scenario_overflow() -> Any:
    """Rank 1's loss overflows in its second batch; no rank takes that step."""
    MixedPrecision = importlib.import_module(f"{library}.plugins.precision").MixedPrecision

    class Overflowing(Net):
        scales: list[float]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.autocast("cpu", enabled=False):
                loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if hvd.rank() == 1 and batch_idx == 1 else loss

        def on_train_batch_end(self, *_: Any) -> None:
            self.scales.append(scaler.get_scale())

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = Overflowing(sgd)
    model.scales = []
    trainer_of(max_epochs=1, plugins=[MixedPrecision("16-mixed", "cpu", scaler)], gradient_clip_val=0.1).fit(
        model, loader()
    )
    return {"weights": flat(model.net), "scales": model.scales}


def scenario_manual() -> Any:
    """Two optimizers by hand, two backward passes before a step of the first."""

    class Manual(Net):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [sgd(self.net[0].parameters()), torch.optim.AdamW(self.net[2].parameters(), lr=0.05)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            first.zero_grad()
            second.zero_grad()
            self.manual_backward(loss_of(self.net, batch))
            self.manual_backward(self.net(batch[0]).square().mean())
            self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            first.step()
            second.step()

    model = Manual(sgd)
    trainer_of().fit(model, loader())
    return flat(model.net)


def scenario_checkpoint() -> Any:
    """Stops in the middle and goes on from the file, which only rank 0 has written."""
    names: list[str] = []
    checkpoint = directory / "stopped.ckpt"
    model = Net(sgd)
    trainer = trainer_of(max_epochs=1)
    trainer.fit(model, loader())
    written = torch.save

    def save(value: Any, *arguments: Any, **options: Any) -> None:
        names.append(str(checkpoint))
        written(value, *arguments, **options)

    torch.save = save
    try:
        trainer.save_checkpoint(checkpoint)
    finally:
        torch.save = written
    exists = checkpoint.exists()  # on every rank, when save_checkpoint() returns
    resumed = Net(sgd)
    trainer_of().fit(resumed, loader(), ckpt_path=checkpoint)
    return {"weights": flat(resumed.net), "writes": len(names), "exists": exists}


def scenario_collectives() -> Any:
    """What hooks of a LightningModule call: log, all_gather, broadcast, reduce; and a metric of torchmetrics."""
    torchmetrics = importlib.import_module("torchmetrics")

    class Logging(Net):
        def __init__(self) -> None:
            super().__init__(sgd)
            self.metric = torchmetrics.MeanMetric()
            self.out: dict[str, Any] = {}

        def on_train_start(self) -> None:
            strategy = self.trainer.strategy
            own = torch.tensor([1.0, hvd.rank()], requires_grad=True)
            gathered = self.all_gather(own, sync_grads=True)
            (gathered * torch.tensor([[1.0], [10.0]])).sum().backward()
            self.out = {
                "world": [self.trainer.global_rank, self.trainer.world_size, self.trainer.is_global_zero],
                "gathered": gathered.tolist(),
                "gradient": own.grad.tolist(),
                "plain": self.all_gather(torch.tensor(hvd.rank())).tolist(),
                "word": strategy.broadcast(f"from {hvd.rank()}", src=1),
                "sum": strategy.reduce(torch.tensor(hvd.rank() + 1), reduce_op="sum").item(),
                "mean": strategy.reduce(torch.tensor(hvd.rank() + 1.0)).item(),
                "max": strategy.reduce(torch.tensor(hvd.rank() + 1.0), reduce_op=torch.distributed.ReduceOp.MAX).item(),
                "all": strategy.reduce_boolean_decision(hvd.rank() == 0, all=True),
                "any": strategy.reduce_boolean_decision(hvd.rank() == 0, all=False),
            }

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.metric.update(batch[1], weight=1.0)
            self.log("rank", float(hvd.rank()), sync_dist=True, on_epoch=True, on_step=False)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.out["metric"] = self.metric.compute().item()

    model = Logging()
    trainer = trainer_of(max_epochs=1)
    trainer.fit(model, loader())
    return model.out | {"logged": trainer.callback_metrics["rank"].item()}


def scenario_evaluation() -> Any:
    """validate() and predict() see each row once; EarlyStopping decides alike on all ranks."""

    class Evaluating(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", loss_of(self.net, batch), sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

    model = Evaluating(sgd)
    stopping = importlib.import_module(f"{library}.callbacks").EarlyStopping("loss", patience=0, min_delta=1e9)
    trainer = trainer_of(max_epochs=5, callbacks=[stopping])
    trainer.fit(model, loader(), loader())
    loss = trainer.validate(model, loader(), verbose=False)[0]["loss"]
    predicted = torch.cat(trainer.predict(model, loader())).flatten().tolist()
    return {"epochs": trainer.current_epoch, "loss": loss, "weights": flat(model.net), "predicted": predicted}


def scenario_misuse() -> Any:
    messages = []
    for mistake in (
        lambda: integration.HvdliteStrategy(backward_passes_per_step=2),
        lambda: integration.HvdliteStrategy().reduce(torch.ones(1), reduce_op="median"),
    ):
        try:
            mistake()
        except ValueError as error:
            messages.append(str(error))
    return messages


SCENARIOS = {name.removeprefix("scenario_"): value for name, value in globals().items() if name.startswith("scenario_")}
results = {name: SCENARIOS[name]() for name in sys.argv[3:] or SCENARIOS}
print("RESULTS", json.dumps(results), flush=True)
