"""Tiny random encoders of `transformers`, saved as their makers publish them."""

import json

import torch

SIZE = 64
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
STAGES = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}


def configs():
    """Name -> (configuration, shape of the features of a 64x64 image)."""
    import transformers as t

    return {
        "vit": (t.ViTConfig(image_size=32, patch_size=16, **SMALL), (16, 4, 4)),
        "dinov2": (t.Dinov2Config(image_size=28, patch_size=14, **SMALL), (16, 4, 4)),
        "dinov3": (
            t.DINOv3ViTConfig(image_size=32, patch_size=16, num_register_tokens=2, **SMALL),
            (16, 4, 4),
        ),
        "siglip": (t.SiglipVisionConfig(image_size=32, patch_size=16, **SMALL), (16, 4, 4)),
        "convnext": (t.ConvNextConfig(**STAGES), (16, 2, 2)),
        "dinov3_convnext": (t.DINOv3ConvNextConfig(**STAGES), (16, 2, 2)),
        "resnet": (t.ResNetConfig(embedding_size=8, layer_type="basic", **STAGES), (16, 2, 2)),
    }


def save(folder, config, *, seed=0, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3)):
    """A random model of this configuration in `folder`, which is returned."""
    from transformers import AutoModel

    torch.manual_seed(seed)
    model = AutoModel.from_config(config)
    with torch.no_grad():
        for name, value in model.named_parameters():  # LayerScale of ConvNeXt begins at 1e-6
            if "layer_scale" in name or name.endswith("gamma"):
                value.fill_(1.0)
    model.save_pretrained(folder)
    if mean is not None:
        text = json.dumps({"do_normalize": True, "image_mean": list(mean), "image_std": list(std)})
        (folder / "preprocessor_config.json").write_text(text)
    return folder
