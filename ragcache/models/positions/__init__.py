"""Ways of telling a model where its tokens stand, and how a segment moves under each."""

from ragcache.models.positions.alibi import Alibi
from ragcache.models.positions.learned import Learned
from ragcache.models.positions.rotary import Rotary
from ragcache.models.positions.scheme import PositionScheme

__all__ = ["Alibi", "Learned", "PositionScheme", "Rotary"]
