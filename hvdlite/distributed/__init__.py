"""A backend of torch.distributed: ``dist.init_process_group("hvdlite")``.

torch finds it without an import where hvdlite is installed; importing this package does the same. See
docs/torch-distributed.md.
"""

from hvdlite_torch_backend import register

register()
