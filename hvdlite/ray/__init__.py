"""Ranks that are actors of Ray; the drop-in for horovod.ray::

    from hvdlite.ray import RayExecutor

    ray.init()
    executor = RayExecutor(RayExecutor.create_settings(), num_workers=4)
    executor.start()
    losses = executor.run(train, args=[0.1])  # train calls hvd.init(), as under any launcher
    executor.shutdown()

Ray itself (``pip install 'hvdlite[ray]'``) is imported by start().
"""

from hvdlite.ray.executor import RayExecutor, Settings

__all__ = ["RayExecutor", "Settings"]
