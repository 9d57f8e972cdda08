"""Once this module is imported, `import horovod.torch as hvd` gives hvdlite, also where the real Horovod is installed.

`python -m hvdlite horovod train.py` does it for a script that must not be edited. Under every name of Horovod's in
`MODULES` stands a mirror: a module without anything of its own, which hands out what is in ours.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from hvdlite.version import __version__

INTERFACE = "0.28.1"  # the Horovod whose interface this is; programs compare its version

# A module of Horovod's, and which of ours have its contents; the first that has a name wins.
MODULES: dict[str, tuple[str, ...]] = {
    "horovod": ("hvdlite",),
    "horovod.common": ("hvdlite",),
    "horovod.common.elastic": ("hvdlite.compat.elastic", "hvdlite.errors"),
    "horovod.common.exceptions": ("hvdlite.errors",),
    "horovod.common.process_sets": ("hvdlite.torch", "hvdlite.torch.process_set"),
    "horovod.common.util": ("hvdlite.compat.common",),
    "horovod.data": ("hvdlite.compat.data",),
    "horovod.data.data_loader_base": ("hvdlite.compat.data",),
    "horovod.ray": ("hvdlite.ray",),
    "horovod.ray.runner": ("hvdlite.ray",),
    "horovod.run": ("hvdlite.compat.runner",),
    "horovod.runner": ("hvdlite.compat.runner",),
    "horovod.runner.launch": ("hvdlite.compat.runner",),
    "horovod.runner.util": (),
    "horovod.runner.util.threads": ("hvdlite.compat.threads",),
    "horovod.tensorflow": ("hvdlite.compat.frameworkless",),
    "horovod.tensorflow.mpi_ops": ("hvdlite.compat.frameworkless", "hvdlite.compat.basics"),
    "horovod.torch": ("hvdlite.torch",),
    "horovod.torch.compression": ("hvdlite.torch.compression",),
    "horovod.torch.elastic": ("hvdlite.torch.elastic",),
    "horovod.torch.elastic.sampler": ("hvdlite.torch.elastic",),
    "horovod.torch.elastic.state": ("hvdlite.torch.elastic", "hvdlite.torch.elastic.handlers"),
    "horovod.torch.functions": ("hvdlite.torch.functions", "hvdlite.torch"),
    "horovod.torch.mpi_ops": ("hvdlite.torch", "hvdlite.compat.basics"),
    "horovod.torch.optimizer": ("hvdlite.torch.optimizer", "hvdlite.torch", "hvdlite.compat.basics"),
    "horovod.torch.sync_batch_norm": ("hvdlite.torch",),
}

_PYTORCH_ONLY = "hvdlite, which stands in for Horovod here, is for PyTorch only; use horovod.torch"
_OTHER_LAUNCHERS = (
    "hvdlite, which stands in for Horovod here, has no such launcher; start ranks with hvdliterun, or from a program "
    "with hvdlite.run"
)

NOT_HERE = {
    "horovod._keras": _PYTORCH_ONLY,
    "horovod.common.basics": "of HorovodBasics hvdlite has what programs call: use the functions of horovod.torch",
    "horovod.keras": _PYTORCH_ONLY,
    "horovod.mxnet": _PYTORCH_ONLY,
    "horovod.ray.elastic": _OTHER_LAUNCHERS,
    "horovod.ray.elastic_v2": _OTHER_LAUNCHERS,
    "horovod.ray.worker": _OTHER_LAUNCHERS,
    "horovod.runner.common": _OTHER_LAUNCHERS,
    "horovod.runner.driver": _OTHER_LAUNCHERS,
    "horovod.runner.elastic": _OTHER_LAUNCHERS,
    "horovod.runner.gloo_run": _OTHER_LAUNCHERS,
    "horovod.runner.http": _OTHER_LAUNCHERS,
    "horovod.runner.js_run": _OTHER_LAUNCHERS,
    "horovod.runner.mpi_run": _OTHER_LAUNCHERS,
    "horovod.spark": _OTHER_LAUNCHERS,
    "horovod.tensorflow.elastic": _PYTORCH_ONLY,
    "horovod.tensorflow.keras": _PYTORCH_ONLY,
    "horovod.torch.mpi_lib_v2": "hvdlite has no such library; use the functions of horovod.torch",
}
"""Modules of Horovod's that hvdlite does not have, with all below them, and what to do instead."""

_ON_PATH = Path(__file__).parent / "on_path" / "horovod.py"


class _Mirror(ModuleType):
    """Looks a name up when it is asked for, so that whatever is added to our modules is in Horovod's too."""

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [name for name in dir(self) if not name.startswith("_")]
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in MODULES:  # as where Horovod imports its own submodules
            try:
                return import_module(f"{self.__name__}.{name}")
            except ModuleNotFoundError as error:
                raise AttributeError(f"{self.__name__}.{name}: {error}") from error
        for source in self._sources():
            if hasattr(source, name):
                return getattr(source, name)
        raise AttributeError(f"{self.__name__}.{name}: hvdlite, which stands in for Horovod here, has no such name")

    def __dir__(self) -> list[str]:
        names = {name for source in self._sources() for name in getattr(source, "__all__", dir(source))}
        return sorted(names | set(super().__dir__()))

    def __reduce__(self) -> tuple[Any, ...]:
        # For cloudpickle, which sends functions with their `hvd` and knows plain modules only.
        return import_module, (self.__name__,)

    def _sources(self) -> list[ModuleType]:
        return [import_module(source) for source in MODULES[self.__name__]]


class _CallableMirror(_Mirror):
    """`horovod.run` is a function, and was in early versions a module with that function in it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class _Finder(MetaPathFinder, Loader):
    """Makes the mirrors. Stands before all other finders, so that an installed Horovod is not looked for."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in MODULES:
            parts = name.split(".")
            for count in range(len(parts), 1, -1):
                if (reason := NOT_HERE.get(".".join(parts[:count]))) is not None:
                    raise ModuleNotFoundError(f"no module {name}: {reason}", name=name)
            return None
        is_package = any(other.startswith(f"{name}.") for other in MODULES)
        spec = ModuleSpec(name, self, origin=__file__, is_package=is_package)
        spec.has_location = True  # so that "cannot import name" says whose module it is
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        mirror = _CallableMirror if spec.name == "horovod.run" else _Mirror
        return mirror(spec.name, f"hvdlite's stand-in for {spec.name}: {', '.join(MODULES[spec.name])}.")

    def exec_module(self, module: ModuleType) -> None:
        for source in MODULES[module.__name__]:
            import_module(source)
        if module.__name__ == "horovod":
            module.__dict__["__version__"] = f"{INTERFACE}+hvdlite.{__version__}"


def _install() -> None:
    """Make `horovod` ours from here on.

    Raises:
        ImportError: the real Horovod has been imported already.
    """
    present = sys.modules.get("horovod")
    origin = getattr(present, "__file__", None)
    if origin == str(_ON_PATH):
        del sys.modules["horovod"]  # on_path/horovod.py, which is being imported, wants a mirror in its place
    elif present is not None:
        raise ImportError(
            f"horovod has been imported already, from {origin}: import hvdlite.compat.horovod before it, or start the "
            "program with python -m hvdlite horovod"
        )
    sys.meta_path.insert(0, _Finder())
    import_module("horovod")


def search_path() -> str:
    """A directory for sys.path in which a process started from this one finds a `horovod` that imports this module.

    A spawned DataLoader worker takes over sys.path, and nothing else.
    """
    return str(_ON_PATH.parent)


_install()
