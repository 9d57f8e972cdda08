"""A program whose ranks go on after failures; tests add what it says at the end, of its ``weights``: 20 per rank."""

from __future__ import annotations

TRAINS = """
import torch
import hvdlite.torch as hvd
hvd.init()
weights = torch.nn.Parameter(torch.zeros(3))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), [("weights", weights)], op=hvd.Sum)
state = hvd.elastic.TorchState(torch.nn.ParameterList([weights]), optimizer, batch=0)

@hvd.elastic.run
def train(state):
    while state.batch < 20:
        optimizer.zero_grad()
        (-weights.sum()).backward()
        optimizer.step()
        state.batch += 1
        state.commit()

train(state)
"""
