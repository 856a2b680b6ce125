"""Models of keras on JAX, at their real depths, on small images."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.models.zoo.kinds import Model, cross_entropy


BATCH, SIZE = 8, 64


def _keras(kind: str, **options: Any) -> Model:
    import keras

    keras.utils.set_random_seed(0)
    module = getattr(keras.applications, kind)(
        weights=None, input_shape=(SIZE, SIZE, 3), classes=10, classifier_activation=None, **options
    )

    def apply(params, state, batch, train):
        return module.stateless_call(params, state, batch["x"], training=train)

    # Values of any size that a picture has; the first layers of some models scale them.
    x = np.random.default_rng(1).uniform(-1, 1, (BATCH, SIZE, SIZE, 3)).astype(np.float32)
    labels = np.random.default_rng(2).integers(0, 10, (BATCH,), dtype=np.int32)
    params = [v.value for v in module.trainable_variables]
    state = [v.value for v in module.non_trainable_variables]
    return Model(params, {"x": x, "labels": labels}, apply, cross_entropy, state)


MODELS = {
    "keras ResNet50": lambda: _keras("ResNet50"),
    "keras MobileNetV2": lambda: _keras("MobileNetV2"),
    "keras EfficientNetB0": lambda: _keras("EfficientNetB0"),
}
