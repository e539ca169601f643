"""The actor that makes rollouts for a trainer elsewhere."""

from typing import TYPE_CHECKING

from penstock_compat.lazy import lazy_attributes

if TYPE_CHECKING:
    from penstock.scale.rollouter import AsyncRollouter

__all__ = ["AsyncRollouter"]

__getattr__ = lazy_attributes(__name__, {"AsyncRollouter": "penstock.scale.rollouter"})
