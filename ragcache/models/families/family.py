"""What differs between families of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from ragcache.attention import backend_for
from ragcache.models.causal import CausalLM
from ragcache.models.dimensions import Dimensions
from ragcache.models.families.refusals import check_properties
from ragcache.models.patch import patch
from ragcache.models.positions import PositionScheme, Rotary


class Family(ABC):
    """Models that are served alike. A subclass overrides what differs, most often `scheme` alone.

    model_types: the `model_type`s of the configurations. The model's attention is expected to go
    through `transformers.AttentionInterface` and to hand its keyword arguments on to it.
    """

    model_types: ClassVar[tuple[str, ...]]

    def check(self, config: Any) -> None:
        """Raises `UnsupportedModel` and names the property that is not served."""
        check_properties(config)

    @abstractmethod
    def scheme(self, model: Any) -> PositionScheme:
        """How the model knows where its tokens stand."""

    def dimensions(self, config: Any) -> Dimensions:
        """The sizes of the model."""
        return Dimensions.of(config)

    def patch(self, model: Any) -> None:
        """Makes the model attend to a step's plan where it is given one, in place."""
        patch(model)

    def serve(self, model: Any) -> CausalLM:
        """Makes of a Hugging Face model what the engine runs. Overridden by families that are
        served by another kind of model. Raises `UnsupportedModel` before it changes anything."""
        self.check(model.config)
        scheme, dimensions = self.scheme(model), self.dimensions(model.config)
        self.patch(model)
        model.eval()
        return CausalLM(model, scheme, backend_for(model.device), dimensions)


class RotaryFamily(Family):
    """Rotary positions, from the stack's `rotary_emb`.

    interleaved: dimensions 2i and 2i+1 turn together.
    """

    interleaved: ClassVar[bool] = False

    def scheme(self, model: Any) -> PositionScheme:
        embedding = model.base_model.rotary_emb
        return Rotary.of(model.config, embedding, interleaved=self.interleaved)
