"""What every Python of the suites that start many does first: look seldom for garbage, and not at all at the end; and
import torch's compiler, and what it knows of operations on no data, only where somebody asks for it.

A rank needs 3 s of a processor to import torch, to make an optimizer and to end: 1.3 for the compiler, which the
first step of an optimizer imports to be left alone by it, 0.4 for results on the device "meta", and half a second for
looks through all that was made. The suite mpi has torch as it is, and ends as programs of users do.
"""

import atexit
import gc
import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

gc.set_threshold(200_000, 50, 100)
atexit.register(gc.freeze)  # the first that is registered is the last that is called

COMPILER = "torch._dynamo"
ON_META = "torch._meta_registrations"
WITH_ON_META = ("torch._decomp", "torch._prims", "torch._refs")


class Later(ModuleType):
    """A module that is imported when somebody asks for what is in it."""

    __path__ = ()  # a package

    def __getattr__(self, name):
        if name.startswith("__"):  # the machinery of imports asks what a module has
            raise AttributeError(name)
        finder.let_in(self.__name__)
        return getattr(importlib.import_module(self.__name__), name)


class CompilerLater(Later):
    """`COMPILER`, as it is to who does not compile."""

    def graph_break(self, msg=""):
        pass

    def disable(self, fn=None, recursive=True, **_):
        return fn


class Finder:
    """Finds `COMPILER` and `ON_META` empty; imports them before a part of the one, or what goes with the other."""

    def __init__(self):
        self._later = {COMPILER, ON_META}

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if self._whole(name) in self._later else None

    def let_in(self, name):
        """Import the whole that ``name`` belongs to."""
        whole = self._whole(name)
        if whole in self._later:
            self._later.remove(whole)
            self.let_in(ON_META)  # the compiler needs it, and would import it in the middle of what it needs itself
            del sys.modules[whole]
            importlib.import_module(whole)

    def create_module(self, spec):
        if spec.name == COMPILER:
            return CompilerLater(COMPILER)
        if spec.name == ON_META:
            return None
        self.let_in(spec.name)
        return importlib.import_module(spec.name)  # in the middle of an import by this thread, of which it is part

    def exec_module(self, module):
        if module.__name__ == ON_META and ON_META in self._later:
            import torch

            for name in WITH_ON_META:
                setattr(torch, name.removeprefix("torch."), Later(name))
            if hasattr(torch._C, "_set_generator_metaclass"):  # which random numbers need, and older ones have not
                from torch._opaque_base import OpaqueBaseMeta

                torch._C._set_generator_metaclass(OpaqueBaseMeta)

    @staticmethod
    def _whole(name):
        return COMPILER if f"{name}.".startswith(f"{COMPILER}.") else ON_META if name in WITH_ON_META else name


finder = Finder()
sys.meta_path.insert(0, finder)
