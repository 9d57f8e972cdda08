"""What every Python of the suites that start many does first: look seldom for garbage, and not at all at the end; and
import torch's compiler only where something is compiled.

A rank needs 3 s of a processor to import torch, to make an optimizer and to end: 1.3 for the compiler, which the first
step of an optimizer imports to be left alone by it, and half a second for looks through all that was made. The suite
mpi has torch as it is, and ends as programs of users do.
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


class CompilerLater(ModuleType):
    """`COMPILER`, as it is to who does not compile, until somebody asks for more."""

    __path__ = ()  # a package

    def graph_break(self, msg=""):
        pass

    def disable(self, fn=None, recursive=True, **_):
        return fn

    def __getattr__(self, name):
        if name.startswith("__"):  # the machinery of imports asks what a module has
            raise AttributeError(name)
        return getattr(finder.imported(), name)


class Finder:
    """Finds `CompilerLater`, and imports the compiler before a part of it."""

    is_later = True

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if self.is_later and f"{name}.".startswith(f"{COMPILER}.") else None

    def imported(self):
        """The compiler itself."""
        if self.is_later:
            self.is_later = False
            del sys.modules[COMPILER]
            importlib.import_module(COMPILER)
        return sys.modules[COMPILER]

    def create_module(self, spec):
        if spec.name == COMPILER:
            return CompilerLater(COMPILER)
        self.imported()
        return importlib.import_module(spec.name)  # in the middle of an import by this thread, of which it is part

    def exec_module(self, module):
        pass


finder = Finder()
sys.meta_path.insert(0, finder)
