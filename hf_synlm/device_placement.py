"""Where the weights of a model may lie: on devices that compute with them."""

from typing import Any, Self


class NoOffloading:
    """Mixin of the base classes: what offloading would break is an error on loading, not a wrong number later.

    Offloading (`device_map` with "disk", or with "cpu" beside a GPU) brings the weights of a module back when the
    module is called. Charts, stacks and recurrences read the weights of their parts without calling these.
    """

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Self:
        """Load a model as transformers does.

        Args:
            *args: see `PreTrainedModel.from_pretrained`.
            **kwargs: see there.

        Returns:
            The model (with `output_loading_info`, a tuple with the report).

        Raises:
            ValueError: if parts of it would be offloaded.
        """
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
        if "disk" in places or ("cpu" in places and len(places) > 1):
            raise ValueError(
                f"device_map={kwargs.get('device_map')!r} puts parts of {cls.__name__} on {sorted(places)}, but it "
                "cannot be offloaded: its layers read weights of their parts directly. Load it on one device "
                '(device_map={"": 0} or {"": "cpu"}), or in a smaller type (dtype="bfloat16").'
            )
        return loaded


__all__ = ["NoOffloading"]
