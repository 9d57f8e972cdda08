"""What people see of an error that ends a job: its message once and first, and the lines of their own program."""

from __future__ import annotations

from fault_lab import run

PROGRAM = """
import torch
import hvdlite.torch as hvd

def train():
    loss = model(torch.ones(1, 3)).sum()
    loss.backward()
    if sys.argv[1] == "raise" and hvd.rank() == 1:
        raise ValueError("the loss is not a number")
    optimizer.step()

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(3, 2 if sys.argv[1] == "raise" or hvd.rank() == 0 else 4)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
while True:
    optimizer.zero_grad()
    train()
"""


def check_trimmed(text: str) -> None:
    assert "in train" in text
    assert "/hvdlite/" not in text
    assert "/torch/" not in text


def test_a_mistake_that_every_rank_hears_of() -> None:
    result = run(PROGRAM, "mismatch", n=2)
    assert result.returncode != 0
    text = result.ranks[0].stderr
    assert text.startswith("hvdlite.errors.MismatchError: "), result
    assert text.count("MismatchError") == 1
    check_trimmed(text)
    assert not any("without a word" in rank.stderr for rank in result.ranks), result


def test_an_error_of_one_rank() -> None:
    """Python shows it there; the other ranks name it in one line, and where they waited."""
    result = run(PROGRAM, "raise", n=2, alone=True)
    assert result.returncode != 0
    own = result.ranks[1].stderr
    assert own.startswith("Traceback"), result
    assert own.rstrip().endswith("ValueError: the loss is not a number")
    check_trimmed(own)
    other = result.ranks[0].stderr
    assert other.count("rank 1 raised ValueError: the loss is not a number") == 1, result
    check_trimmed(other)


def test_a_mistake_that_all_ranks_make() -> None:
    """One of them shows it, and the others say in a line which."""
    result = run("import hvdlite.torch as hvd\nhvd.init()\nprint({}['no such key'])", n=2, alone=True)
    assert result.returncode != 0
    texts = [rank.stderr for rank in result.ranks]
    assert sum(text.count("Traceback") for text in texts) == 1, result
    assert sum(text.count("KeyError: 'no such key'") for text in texts) == 2, result


def test_all_frames_if_asked_for() -> None:
    text = run(PROGRAM, "mismatch", n=2, env={"HVDLITE_FULL_TRACEBACKS": "1"}).ranks[0].stderr
    assert text.startswith("Traceback")
    assert "/hvdlite/torch/" in text


def test_the_rank_that_raised_is_named_where_it_takes_long_to_say_so() -> None:
    """It tells the others before it prints, and prints for a while on a busy machine."""
    slow = """
def shown(*error):
    time.sleep(0.4)
    sys.__excepthook__(*error)

if os.environ["HVDLITE_RANK"] == "1":
    sys.excepthook = shown
"""
    result = run(slow + PROGRAM, "raise", n=2, alone=True, mpi="none")
    assert result.returncode == 1
    assert "rank 1 (pid" in result.launcher_output, result
