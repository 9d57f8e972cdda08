// Who goes on, and when. Actors are streams, and threads of the host that call the driver.
//
// By default each goes on by itself. With GPUSIM_PCT=seed one goes on at a time: of those that can, the one with the
// highest priority; priorities are random and change at random points (Burckhardt et al. 2010, "A randomized scheduler
// with probabilistic guarantees of finding bugs", doi:10.1145/1736020.1736040). An actor gives its turn back at the end
// of a task, or with the next call of the driver. A thread of the host that has not called for GPUSIM_PATIENCE_US
// (which may wait for another thread, or compute) is waited for no longer, nor is a host function that takes longer.
// Where none can go on, other threads and processes may change that: it is looked at again until one can.
//
// A seed repeats a schedule as far as no thread's patience has run out and no other process has a say.
#pragma once

#include <functional>

namespace gpusim {

// True when whoever waits may go on. Called by any thread, time and again; its atomic loads are all that orders.
using Condition = std::function<bool()>;

class Actor;

// An actor is announced by the thread that makes it, so that the order is certain, and is then what a thread becomes. A
// thread of the host is one from its first call.
Actor* announce_stream();
void become(Actor*);
// The calling thread, a stream, acts no longer.
void retire();

// Returns when it is the calling thread's turn and the condition holds.
void take_turn(const Condition& condition);

// Others may come first.
void switch_point();

}  // namespace gpusim
