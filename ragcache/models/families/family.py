"""What differs between families of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import nn

from ragcache.attention import backend_for
from ragcache.errors import UnsupportedModel
from ragcache.models.causal import CausalLM
from ragcache.models.contiguous import ContiguousLM, LayeredRotary
from ragcache.models.dimensions import Dimensions
from ragcache.models.families.refusals import (
    check_properties,
    layer_types,
    sliding_window,
    whole_context,
)
from ragcache.models.language import LanguageModel
from ragcache.models.patch import patch
from ragcache.models.positions import PositionScheme, Rotary


class Family(ABC):
    """Models that are served alike. A subclass overrides what differs, most often `scheme` alone.

    model_types: the `model_type`s of the configurations. The model's attention is expected to go
    through `transformers.AttentionInterface` and to hand its keyword arguments on to it.
    """

    model_types: ClassVar[tuple[str, ...]]

    def check(self, config: Any) -> None:
        """Raises `UnsupportedModel` and names the property that is served in no way."""
        check_properties(config)

    def obstacle(self, config: Any) -> str | None:
        """Why a configuration's attention needs its whole context in one piece, None where it can
        read segments."""
        return whole_context(config)

    @abstractmethod
    def scheme(self, model: Any) -> PositionScheme:
        """How the model knows where its tokens stand."""

    def dimensions(self, config: Any) -> Dimensions:
        """The sizes of the model."""
        return Dimensions.of(config)

    def patch(self, model: Any) -> None:
        """Makes the model attend to a step's plan where it is given one, in place. Raises
        `UnsupportedModel` before it changes anything."""
        patch(model)

    def serve(self, model: Any) -> LanguageModel:
        """Makes of a Hugging Face model what the engine runs, in place: it reads segments where it
        can, else one buffer. Raises `UnsupportedModel` before it changes anything."""
        if self.obstacle(model.config) is None:
            return self.segmented(model)
        return self.contiguous(model)

    def segmented(self, model: Any) -> CausalLM:
        """A model that reads segments. Raises `UnsupportedModel` before it changes anything."""
        self.check(model.config)
        obstacle = self.obstacle(model.config)
        if obstacle is not None:
            raise UnsupportedModel(
                f"this {model.config.model_type} model {obstacle}, so it cannot read segments"
            )
        scheme, dimensions = self.scheme(model), self.dimensions(model.config)
        self.patch(model)
        model.eval()
        return CausalLM(model, scheme, backend_for(model.device), dimensions)

    def contiguous(self, model: Any) -> ContiguousLM:
        """A model that reads one buffer, for families that can. Raises `UnsupportedModel` before it
        changes anything."""
        self.check(model.config)
        why = self.obstacle(model.config)
        raise UnsupportedModel(
            f"this {model.config.model_type} model {why or 'reads segments'}; "
            "its family is not served from one buffer"
        )


class RotaryFamily(Family):
    """Rotary positions, from the stack's `rotary_emb`.

    interleaved: dimensions 2i and 2i+1 turn together.
    """

    interleaved: ClassVar[bool] = False

    def scheme(self, model: Any) -> PositionScheme:
        embedding = self.rotary_embedding(model)
        return Rotary.of(model.config, embedding, interleaved=self.interleaved)

    def rotary_embedding(self, model: Any) -> nn.Module:
        """The module that holds the frequencies."""
        found = getattr(model.base_model, "rotary_emb", None)
        if not isinstance(found, nn.Module):
            raise UnsupportedModel(
                f"this {model.config.model_type} model has no `rotary_emb` in its stack; its "
                "family has to say where its frequencies are (`rotary_embedding`)"
            )
        return found

    def contiguous(self, model: Any) -> ContiguousLM:
        config = model.config
        self.check(config)
        types = layer_types(config)
        embedding = self.rotary_embedding(model)
        scheme = LayeredRotary.of(config, embedding, types, interleaved=self.interleaved)
        # PyTorch's fused attention would leave the cap out without a word
        capped = getattr(config, "attn_logit_softcapping", None) is not None
        model.set_attn_implementation("eager" if capped or not model._supports_sdpa else "sdpa")
        model.eval()
        return ContiguousLM(model, scheme, self.dimensions(config), types, sliding_window(config))
