"""The `ray` package, or one line that says how to get it. Everything else here takes Ray from this file."""

from penstock.errors import ConfigError

try:
    import ray
    from ray.exceptions import RayActorError, RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError:
    raise ConfigError('Ray is not installed; pip install "penstock[ray]"') from None

__all__ = ["NodeAffinitySchedulingStrategy", "RayActorError", "RayError", "RayTaskError", "ray"]
