"""Launched by test_transformers.py: trains with Trainer and Accelerator, and prints what came out as JSON.

transformers_job.py DIRECTORY [SCENARIO...]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import hvdlite.torch as hvd
from small_problem import Rows, flat, network

os.environ["HF_HUB_OFFLINE"] = "1"
directory = Path(sys.argv[1])


class Regression(torch.nn.Module):
    """With the interface that Trainer expects: a dictionary in, loss and logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(hvd.rank())  # only rank 0's is to count

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"loss": torch.nn.functional.mse_loss(logits, labels), "logits": logits}


class Rowdicts(Rows):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return {"x": x, "labels": y}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trainer_of(output: str, make: Any = None, rows: int = 24, **options: Any) -> Any:
    from hvdlite.integrations.transformers import HvdliteTrainer, HvdliteTrainingArguments

    defaults = {
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    args = HvdliteTrainingArguments(str(directory / output), **(defaults | options))
    hvd_model = Regression()
    optimizers = (None if make is None else make(hvd_model.parameters()), None)
    return HvdliteTrainer(
        hvd_model,
        args,
        train_dataset=Rowdicts(),
        eval_dataset=Rowdicts(rows),
        optimizers=optimizers,
        compute_metrics=lambda found: {"rows": len(found.predictions), "total": float(found.predictions.sum())},
    )


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def scenario_sgd() -> Any:
    trainer = trainer_of("sgd", sgd)
    output = trainer.train()
    return {"weights": flat(trainer.model.net), "losses": losses_of(trainer), "loss": output.training_loss}


def scenario_adamw() -> Any:
    """The Trainer's own optimizer, clipping, accumulation, warm-up."""
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "learning_rate": 0.05}
    trainer = trainer_of("adamw", **options, lr_scheduler_type="linear", weight_decay=0.1)
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return {"weights": flat(trainer.model.net), "norms": norms}


class Masked(Regression):
    """As language models do: a sum over the labels that count, divided by what the Trainer says is their number."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        counted = labels != -100
        total = (logits - labels)[counted].square().sum()
        return {"loss": total / kwargs.get("num_items_in_batch", counted.sum()), "logits": logits}


class MaskedRows(Rowdicts):
    """Of the first batch, rank 0 has one label that counts, and rank 1 four."""

    def __init__(self) -> None:
        super().__init__()
        self.y[:3] = -100


def scenario_tokens() -> Any:
    from hvdlite.integrations.transformers import HvdliteTrainer

    args = trainer_of("tokens").args
    trainer = HvdliteTrainer(Masked(), args, train_dataset=MaskedRows())
    trainer.optimizer = sgd(trainer.model.parameters())
    trainer.train()
    return flat(trainer.model.net)


def scenario_shuffled() -> Any:
    """The rows that each rank has seen, epoch by epoch."""
    seen: list[Any] = []

    trainer = trainer_of("shuffled", sgd, train_sampling_strategy="random", seed=3)
    inner = trainer.model.forward

    def forward(x: torch.Tensor, labels: torch.Tensor) -> Any:
        seen.extend(x[:, 0].tolist())
        return inner(x=x, labels=labels)

    trainer.model.forward = forward
    trainer._signature_columns = ["x", "labels"]
    trainer.train()
    return seen


def scenario_checkpoint() -> Any:
    """Stops in the middle, and goes on from what rank 0 has saved."""
    stopped = trainer_of("checkpoint", sgd, save_strategy="epoch", num_train_epochs=1)
    stopped.train()
    resumed = trainer_of("checkpoint", sgd)
    resumed.train(resume_from_checkpoint=str(directory / "checkpoint" / "checkpoint-3"))
    return {"weights": flat(resumed.model.net), "saves": stopped.args.should_save, "logs": resumed.args.should_log}


def scenario_evaluate() -> Any:
    """22 rows: two fill up the last batch and are not counted."""
    metrics = trainer_of("evaluate", sgd, rows=22).evaluate()
    return {name: metrics[f"eval_{name}"] for name in ("rows", "total", "loss")}


def scenario_main_process_first() -> Any:
    path = directory / "made_by_rank_0"
    with trainer_of("first").args.main_process_first():
        existed = path.exists()
        path.touch()
    return existed


def accelerator_of(**options: Any) -> Any:
    from accelerate.state import AcceleratorState

    from hvdlite.integrations.accelerate import HvdliteAccelerator

    AcceleratorState._reset_state(reset_partial_state=True)  # which a script does not need: it has one Accelerator
    return HvdliteAccelerator(cpu=True, **options)


def scenario_accelerate() -> Any:
    """A training loop of Accelerate's own kind, with accumulation and clipping."""
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model = Regression()
    loader = torch.utils.data.DataLoader(Rowdicts(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05), loader)
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    return flat(model.net)


def scenario_accelerate_backward() -> Any:
    """loss.backward() where accelerator.backward(loss) belongs: averaged all the same."""
    accelerator = accelerator_of()
    model = Regression()
    loader = torch.utils.data.DataLoader(Rowdicts(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, sgd(model.parameters()), loader)
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
    return flat(model.net)


def scenario_accelerate_collectives() -> Any:
    accelerator = accelerator_of()
    rank = hvd.rank()
    torch.manual_seed(rank)  # a script that seeds its ranks differently still shares one order of the data
    loader = accelerator.prepare(torch.utils.data.DataLoader(list(range(11)), batch_size=3, shuffle=True))
    shuffled = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    loader = accelerator.prepare(torch.utils.data.DataLoader([str(i) for i in range(11)], batch_size=3))
    return {
        "world": [accelerator.process_index, accelerator.num_processes, accelerator.is_main_process],
        "shuffled": shuffled,
        "objects": [accelerator.gather_for_metrics(batch) for batch in loader],
        "gathered": accelerator.gather({"a": torch.tensor([rank] * (rank + 1)), "b": torch.tensor(rank)})["a"].tolist(),
        "sum": accelerator.reduce(torch.tensor([rank + 1.0])).tolist(),
        "mean": accelerator.reduce(torch.tensor([rank + 1.0]), "mean").tolist(),
        "padded": accelerator.pad_across_processes(torch.ones(2, rank + 1), dim=1, pad_index=-1).tolist(),
        "padded_first": accelerator.pad_across_processes(torch.ones(rank + 1), pad_first=True).tolist(),
    }


def scenario_subclass() -> Any:
    """A Trainer of somebody else's, with another loss, made distributed; and what it predicts."""
    from transformers import Trainer

    from hvdlite.integrations.transformers import HvdliteTrainer

    class Doubling(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(model, inputs, *args, **kwargs)
            return (2 * found[0], found[1]) if isinstance(found, tuple) else 2 * found

    class HvdliteDoubling(Doubling, HvdliteTrainer):
        pass

    args = trainer_of("subclass").args
    model = Regression()
    optimizers = (torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), None)
    trainer = HvdliteDoubling(model, args, train_dataset=Rowdicts(), optimizers=optimizers)
    trainer.train()
    return {"weights": flat(model.net), "predicted": trainer.predict(Rowdicts(22)).predictions.flatten().tolist()}


def scenario_save_state() -> Any:
    """Rank 0 writes the model, all read it."""
    accelerator = accelerator_of()
    model = Regression()
    model, _ = accelerator.prepare(model, sgd(model.parameters()))
    before = flat(model.net)
    accelerator.save_state(str(directory / "state"))
    accelerator.wait_for_everyone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(hvd.rank())
    accelerator.load_state(str(directory / "state"))
    return flat(model.net) == before


def scenario_misuse() -> Any:
    from accelerate import PartialState
    from transformers import TrainingArguments

    from hvdlite.integrations.accelerate import HvdliteAccelerator, launcher_hidden
    from hvdlite.integrations.transformers import HvdliteTrainer

    def other_ranks() -> Any:
        state = PartialState()
        before = state.distributed_type
        state.distributed_type = type(before).MULTI_CPU
        try:
            HvdliteAccelerator(cpu=True)
        finally:
            state.distributed_type = before

    with launcher_hidden():
        plain = TrainingArguments(str(directory / "plain"), use_cpu=True, report_to=[])
    messages = []
    for mistake in (
        lambda: HvdliteTrainer(Regression(), plain),
        lambda: accelerator_of().reduce(torch.ones(1), "median"),
        other_ranks,
    ):
        try:
            mistake()
        except (TypeError, ValueError, RuntimeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


hvd.init()
SCENARIOS = {name.removeprefix("scenario_"): value for name, value in globals().items() if name.startswith("scenario_")}
results = {name: SCENARIOS[name]() for name in sys.argv[2:] or SCENARIOS}
results["torch.distributed"] = torch.distributed.is_initialized()
print("RESULTS", json.dumps(results), flush=True)
