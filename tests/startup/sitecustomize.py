"""What every Python of the suites that start many does first: look seldom for garbage, and not at all at the end; and
import torch's compiler, what it knows of operations on no data, and parts that few programs use, only where somebody
asks for them; and know at once which module a frame is of.

A rank needs 3 s of a processor to import torch, to make an optimizer and to end: 1.3 for the compiler, which the
first step of an optimizer imports to be left alone by it, 0.4 for results on the device "meta", 0.1 for graphs that are
exported and for distributions, 0.1 for quantization, masks and the old pipes of data, 0.6 for looks through all that
was made, and 0.05 for the module of a frame, for which Python looks at the files of all modules. To torch's
DistributedDataParallel, which asks the compiler for one setting, it is 1.5. The suite mpi has torch as it is, and ends
as programs of users do.
"""

import atexit
import gc
import importlib
import inspect
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

gc.set_threshold(2_000_000, 50, 100)  # imports make some 200,000 objects
atexit.register(gc.freeze)  # the first that is registered is the last that is called

COMPILER = "torch._dynamo"
ON_META = "torch._meta_registrations"
APART = (
    "torch.export",
    "torch.distributions",
    "torch.masked",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.quantization",
    "torch.utils.data.datapipes.dataframe",
    "torch.utils.data.datapipes.iter",
    "torch.utils.data.datapipes.map",
    "torch.utils.data.graph_settings",
)
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

    def __init__(self, name):
        super().__init__(name)
        self.utils = CompilerUtilsLater(f"{name}.utils")

    def graph_break(self, msg=""):
        pass

    def disable(self, fn=None, recursive=True, **_):
        return fn


class CompilerUtilsLater(Later):
    """Its part that torch's DistributedDataParallel asks: of a setting, which to change is to import them all."""

    def get_optimize_ddp_mode(self):
        return "ddp_optimizer"


class Finder:
    """Finds `COMPILER`, `ON_META` and `APART` empty; imports one before a part of it, or what goes with it."""

    def __init__(self):
        self._later = {COMPILER, ON_META, *APART}

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if self._whole(name) in self._later else None

    def let_in(self, name):
        """Import the whole that ``name`` belongs to."""
        whole = self._whole(name)
        if whole in self._later:
            self._later.remove(whole)
            if whole == COMPILER:  # which needs them, and would import them in the middle of what they need themselves
                self.let_in(ON_META)
                self.let_in("torch.export")
            del sys.modules[whole]
            importlib.import_module(whole)

    def create_module(self, spec):
        if spec.name == COMPILER:
            return CompilerLater(COMPILER)
        if spec.name in APART:
            return Later(spec.name)
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
        if name in WITH_ON_META:
            return ON_META
        return next((whole for whole in (COMPILER, *APART) if f"{name}.".startswith(f"{whole}.")), name)


def module_of(thing, _filename=None, *, found=inspect.getmodule):
    return sys.modules.get(thing.f_globals["__name__"]) if inspect.isframe(thing) else found(thing, _filename)


inspect.getmodule = module_of
finder = Finder()
sys.meta_path.insert(0, finder)
