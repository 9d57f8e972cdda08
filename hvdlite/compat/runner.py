"""`horovod.run` and `horovod.runner`: `hvdlite.run` with Horovod's arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hvdlite
from hvdlite.builds import gloo_built, mpi_built
from hvdlite.cli.run import main as run_commandline

__all__ = ["gloo_built", "mpi_built", "run", "run_commandline"]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """`hvdlite.run`, which see; an argument that hvdlite does not have gets a sentence on stderr.

    Raises:
        ValueError: ``hosts`` and ``hostfile``, or ``use_gloo`` and ``use_mpi``, are given together.
        RuntimeError: whatever a rank raised, or did not start for; `hvdlite.run` raises what the rank raised.
        ConfigError: ``host_discovery_script`` or ``min_num_proc`` is given: ranks are not replaced.
    """
    if hosts is not None and hostfile is not None:
        raise ValueError("horovod.run: give hosts or hostfile, not both")
    if use_gloo and use_mpi:
        raise ValueError("horovod.run: give use_gloo or use_mpi, not both")
    for old, new, value in [("np", "num_", np), ("min_np", "min_num_", min_np), ("max_np", "max_num_", max_np)]:
        if value is not None:
            warnings.warn(f"horovod.run: {old} is deprecated, write {new}proc", DeprecationWarning, stacklevel=2)
    arguments = {
        "min-num-proc": min_np if min_num_proc is None else min_num_proc,
        "max-num-proc": max_np if max_num_proc is None else max_num_proc,
        "slots-per-host": slots,
        "reset-limit": reset_limit,
        "blacklist-cooldown-range": None if cooldown_range is None else ",".join(map(str, cooldown_range)),
        "hostfile": hostfile,
        "host-discovery-script": host_discovery_script,
        "start-timeout": start_timeout,
        "ssh-port": ssh_port,
        "ssh-identity-file": ssh_identity_file,
        "output-filename": output_filename,
        "mpi-args": mpi_args,
        "network-interfaces": network_interface or ",".join(network_interfaces or ()) or None,
    }
    switches = {"disable-cache": disable_cache, "gloo": use_gloo, "mpi": use_mpi}
    options = [
        *(f"--{name}={value}" for name, value in arguments.items() if value is not None),
        *(f"--{name}" for name, given in switches.items() if given),
    ]
    ranks = np if np is not None and num_proc == 1 else num_proc
    try:
        return hvdlite.run(
            func, args, kwargs, ranks, hosts, options=options, executable=executable, verbose=bool(verbose)
        )
    except RuntimeError:
        raise
    except Exception as error:
        # Horovod hears of the exit status only, and its users catch RuntimeError.
        raise RuntimeError(f"a rank raised {type(error).__name__}: {error}") from error
