"""The programs of examples/recipes run as they are, and do what docs/recipes.md says of them."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from launching import Result

pytest.importorskip("sklearn")

Launch = Callable[..., Result]
Names = dict[str, Any]

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"
# Runs a recipe as python does, and leaves some of its variables in a file per rank.
DRIVER = """
import runpy, sys
import torch
import hvdlite.torch as hvd
recipe, names, result = sys.argv[1:4]
sys.argv = [recipe, *sys.argv[4:]]
left = runpy.run_path(recipe, run_name="__main__")
kept = {name: left[name] for name in names.split(",")}
kept = {name: value.state_dict() if isinstance(value, torch.nn.Module) else value for name, value in kept.items()}
torch.save(kept, f"{result}.{hvd.rank()}")
"""


@pytest.fixture
def run(launch: Launch, tmp_path: Path) -> Callable[..., tuple[list[Names], str]]:
    """``run(recipe, names, *arguments, ranks=2)``: variables ``names`` of each rank, and what rank 0 has printed."""

    def run(recipe: str, names: str, *arguments: str, ranks: int = 2) -> tuple[list[Names], str]:
        result = tmp_path / "left"
        done = launch(ranks, DRIVER, str(RECIPES / recipe), names, str(result), *arguments, timeout=240).check()
        assert not any(rank.stdout for rank in done.ranks[1:])
        return [torch.load(f"{result}.{rank}", weights_only=False) for rank in range(ranks)], done.ranks[0].stdout

    return run


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Names]]:
    """``alone(recipe, old, new)``: all variables of one process that has run it, with ``old`` replaced in its text."""

    def alone(recipe: str, old: str = "", new: str = "") -> Names:
        text = (RECIPES / recipe).read_text()
        assert old in text
        path = tmp_path / recipe
        path.write_text(text.replace(old, new))
        monkeypatch.setattr(sys, "argv", [str(path)])
        return runpy.run_path(str(path), run_name="__main__")

    yield alone
    hvd.shutdown()


def flat(state: Names) -> torch.Tensor:
    return torch.cat([state[name].flatten() for name in sorted(state)])


def check_alike(*states: Names) -> None:
    assert all(torch.equal(flat(state), flat(states[0])) for state in states)


def check_close(state: Names, other: Names) -> None:
    """Equal but for the order in which floats were added."""
    torch.testing.assert_close(flat(state), flat(other), rtol=1e-3, atol=1e-4)


def test_accumulation(run: Any, alone: Any) -> None:
    ranks, said = run("accumulation.py", "model,passes,difference,accuracy")
    check_alike(*(rank["model"] for rank in ranks))
    assert ranks[0]["passes"] == 3 and ranks[0]["difference"] < 1e-6 and ranks[0]["accuracy"] > 0.9
    assert "2 rank(s), 3 passes of 32 images" in said
    whole = alone("accumulation.py", "192, 32, 8", "192, 192, 8")  # one process, one pass of all images
    assert whole["passes"] == 1
    check_close(ranks[0]["model"], whole["model"].state_dict())


def test_mixed_precision(run: Any) -> None:
    ranks, said = run("mixed_precision.py", "model,half_model,scales")
    check_alike(*(rank["model"] for rank in ranks))
    check_alike(*(rank["half_model"] for rank in ranks))
    scale, other = ranks[0]["scales"]
    assert scale == other < 2.0**28
    assert all(float(accuracy) > 0.95 for accuracy in re.findall(r"float16: accuracy (\S+)", said))


def test_clipping(run: Any, alone: Any) -> None:
    ranks, said = run("clipping.py", "model,norms")
    check_alike(*(rank["model"] for rank in ranks))
    assert ranks[0]["norms"] == ranks[1]["norms"]
    assert re.search(r"y = 3\.0\d x \+ 1\.[01]\d", said)
    whole = alone("clipping.py")
    check_close(ranks[0]["model"], whole["model"].state_dict())
    assert ranks[0]["norms"] == pytest.approx(whole["norms"], rel=1e-3)


def test_learning_rate(run: Any) -> None:
    ranks, _ = run("learning_rate.py", "model,rates,accuracy")
    check_alike(*(rank["model"] for rank in ranks))
    rates = ranks[0]["rates"]
    assert (rates[0], rates[-1]) == (0.05, 0.1) and rates == sorted(rates)
    assert len(rates) == 435  # 15 epochs of 1797 images by 2 ranks, 32 each
    assert ranks[0]["accuracy"] > 0.97


def train_on_uneven_parts(images: torch.Tensor, labels: torch.Tensor) -> Names:
    """What uneven_data.py amounts to with 2 ranks, in plain torch: batches of all who still have one are one batch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    short, long = (torch.arange(part.start, part.stop).split(32) for part in (range(599), range(599, 1797)))
    for _ in range(10):
        for step, batch in enumerate(long):
            both = torch.cat([short[step], batch]) if step < len(short) else batch
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[both]), labels[both]).backward()
            optimizer.step()
    return model.state_dict()


def test_uneven_data(run: Any) -> None:
    ranks, said = run("uneven_data.py", "model,images,labels,steps,last_rank")
    check_alike(*(rank["model"] for rank in ranks))
    assert [rank["steps"] for rank in ranks] == [190, 380]
    assert [rank["last_rank"] for rank in ranks] == [1, 1]
    assert "rank 0: 599 images, 190 steps\nrank 1: 1198 images, 380 steps\n" in said
    check_close(ranks[0]["model"], train_on_uneven_parts(ranks[0]["images"], ranks[0]["labels"]))


def test_checkpoint(run: Any, tmp_path: Path) -> None:
    file = f"--file={tmp_path / 'digits.pt'}"
    (whole, _), _ = run("checkpoint.py", "model", "--epochs=4")
    run("checkpoint.py", "model", "--epochs=2", file)
    resumed, said = run("checkpoint.py", "model,progress", "--epochs=4", file)
    assert "epochs 2 to 4" in said
    check_alike(whole["model"], *(rank["model"] for rank in resumed))
    assert not list(tmp_path.glob("*.partial"))


def test_several_models(run: Any) -> None:
    ranks, _ = run("several_models.py", "generator,discriminator")
    check_alike(*(rank["generator"] for rank in ranks))
    check_alike(*(rank["discriminator"] for rank in ranks))
    generator = ranks[0]["generator"]
    assert generator["bias"].item() == pytest.approx(1.0, abs=0.15)
    assert abs(generator["weight"].item()) == pytest.approx(0.5, abs=0.1)


def test_process_sets(run: Any) -> None:
    ranks, said = run("process_sets.py", "model,accuracies,mine", ranks=3)
    assert [rank["mine"] for rank in ranks] == [0, 1, 0]
    check_alike(ranks[0]["model"], ranks[2]["model"])
    assert not torch.equal(flat(ranks[0]["model"]), flat(ranks[1]["model"]))
    assert ranks[0]["accuracies"] == ranks[1]["accuracies"] == ranks[2]["accuracies"]
    assert min(ranks[0]["accuracies"]) > 0.88
    assert "the model of ranks [0, 2]" in said


def test_model_parallelism(run: Any, alone: Any) -> None:
    ranks, said = run("model_parallel.py", "inner,outer")
    assert "2368 parameters on each" in said
    whole = alone("model_parallel.py")
    inner = torch.cat([rank["inner"] for rank in ranks])
    outer = torch.cat([rank["outer"] for rank in ranks], dim=1)
    check_close({"inner": inner, "outer": outer}, {"inner": whole["inner"], "outer": whole["outer"]})


def test_every_recipe_is_tested() -> None:
    text = Path(__file__).read_text()
    assert [recipe.name for recipe in RECIPES.glob("*.py") if f'run("{recipe.name}"' not in text] == []
