"""Two finished evaluations, item by item: is the drop of accuracy real? The verb ``emad accuracy``, without a model."""
