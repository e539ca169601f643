"""The `ray` package, or one line that says how to get it. Everything else here takes Ray from this file."""

from penstock.errors import ConfigError
from penstock.system.packages import install_command

try:
    import ray
    from ray.exceptions import RayActorError, RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError:
    raise ConfigError(f"Ray is not installed; {install_command('ray')}") from None

__all__ = ["NodeAffinitySchedulingStrategy", "RayActorError", "RayError", "RayTaskError", "ray"]
