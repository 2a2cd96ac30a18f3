import pytest
import torch

from guerdon.core.errors import ConfigError
from guerdon.models import ResNet10, ResNetEncoderWrapper, SpatialLearnedEmbeddings, make_resnet
from guerdon.rewards.image import ENCODERS, make_encoder

NORM_LEAVES = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]


def torchvision_keys(depths: list[int], convolutions: int) -> set[str]:
    """The names that torchvision gives a ResNet's weights, without `fc`."""
    keys = {"conv1.weight"} | {f"bn1.{leaf}" for leaf in NORM_LEAVES}
    for stage, depth in enumerate(depths, start=1):
        for block in range(depth):
            prefix = f"layer{stage}.{block}."
            for index in range(1, convolutions + 1):
                keys.add(f"{prefix}conv{index}.weight")
                keys |= {f"{prefix}bn{index}.{leaf}" for leaf in NORM_LEAVES}
            if block == 0 and (stage > 1 or convolutions == 3):
                keys.add(f"{prefix}downsample.0.weight")
                keys |= {f"{prefix}downsample.1.{leaf}" for leaf in NORM_LEAVES}
    return keys


@pytest.mark.parametrize(
    ("arch", "depths", "convolutions"),
    [
        ("resnet10", [1, 1, 1, 1], 2),
        ("resnet18", [2, 2, 2, 2], 2),
        ("resnet34", [3, 4, 6, 3], 2),
        ("resnet50", [3, 4, 6, 3], 3),
    ],
)
def test_names_are_torchvisions(arch, depths, convolutions):
    assert set(make_resnet(arch, 8).state_dict()) == torchvision_keys(depths, convolutions)


@pytest.mark.parametrize(
    ("arch", "count"),
    [("resnet18", 11_176_512), ("resnet34", 21_284_672), ("resnet50", 23_508_032)],
)
def test_parameter_counts_are_torchvisions_without_fc(arch, count):
    with torch.device("meta"):
        assert sum(value.numel() for value in make_resnet(arch).parameters()) == count


def test_resnet10_has_as_many_parameters_as_the_published_one():
    assert sum(value.numel() for value in ResNet10(norm="group").parameters()) == 4_905_792
    assert ResNet10().norm == "batch"


@pytest.mark.parametrize("arch", ["resnet10", "resnet18", "resnet34", "resnet50"])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_feature_map_shape(arch, norm):
    net = make_resnet(arch, 8, norm)
    channels = 8 * 32 if arch == "resnet50" else 8 * 8
    assert net.num_features == channels
    assert net(torch.rand(2, 3, 64, 96)).shape == (2, channels, 2, 3)


@pytest.mark.parametrize("same_padding", [False, True])
@pytest.mark.parametrize("size", [(64, 64), (65, 33), (63, 31), (50, 97), (1, 7)])
def test_output_size_is_what_comes_out(size, same_padding):
    net = make_resnet("resnet10", 8, same_padding=same_padding).eval()
    assert net(torch.rand(1, 3, *size)).shape[2:] == net.output_size(*size)


def test_first_block_is_the_residual_formula():
    net = make_resnet("resnet10", 8).eval()
    x = torch.rand(2, 8, 8, 8)
    block = net.layer1[0]
    inner = block.bn2(block.conv2(torch.relu(block.bn1(block.conv1(x)))))
    torch.testing.assert_close(net.layer1(x), torch.relu(inner + x))


def test_group_norm_needs_a_width_that_divides():
    with pytest.raises(ConfigError, match="multiple of 4"):
        make_resnet("resnet10", 10, "group")


def test_changing_the_layout_keeps_the_convolutions():
    net = make_resnet("resnet10", 8)
    before = {name: value.clone() for name, value in net.state_dict().items() if "conv" in name}
    net.use_layout("group", same_padding=True)
    assert not any("running_mean" in name for name in net.state_dict())
    assert set(net.state_dict()) == set(make_resnet("resnet10", 8, "group").state_dict())
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())


def test_spatial_embeddings_are_the_weighted_sums():
    layer = SpatialLearnedEmbeddings(height=3, width=2, channel=5, num_features=4)
    features = torch.rand(7, 5, 3, 2)
    assert layer.kernel.shape == (5, 3, 2, 4)
    naive = (features.unsqueeze(-1) * layer.kernel).sum((2, 3)).reshape(7, 20)
    torch.testing.assert_close(layer(features), naive)


def test_spatial_embeddings_keep_the_scale_of_their_input():
    layer = SpatialLearnedEmbeddings(height=8, width=8, channel=256, num_features=8)
    assert 0.9 < layer(torch.randn(64, 256, 8, 8)).std() < 1.1


@pytest.mark.parametrize(("use_pretrain", "kernel"), [(True, (64, 2, 3, 5)), (False, (64, 1, 1, 5))])
def test_wrapper_pools_the_map_or_its_average(use_pretrain, kernel):
    wrapper = ResNetEncoderWrapper(
        "resnet10", image_size=[3, 64, 96], num_spatial_blocks=5, use_pretrain=use_pretrain, width=8
    )
    assert wrapper.state_dict()["pooling_layer.kernel"].shape == kernel
    pixels = torch.rand(3, 3, 64, 96)
    wrapper.eval()
    maps = wrapper.backbone(pixels)
    if not use_pretrain:
        maps = maps.mean((2, 3), keepdim=True)
    expected = torch.einsum("nchw,chwf->ncf", maps, wrapper.pooling_layer.kernel).reshape(3, -1)
    torch.testing.assert_close(wrapper(pixels), expected)
    assert wrapper.out_dim == expected.shape[1]


def test_wrapper_needs_no_arguments():
    wrapper = ResNetEncoderWrapper()
    assert wrapper.backbone.arch == "resnet10"
    assert wrapper.feature_shape == (512, 2, 2)


def test_encoders_are_made_by_name():
    for name in set(ENCODERS) - {"cnn"}:
        net = make_encoder(name, width=8, in_channels=1)
        assert (net.arch, net.conv1.in_channels) == (name, 1)
    with pytest.raises(ConfigError, match="no encoder 'vit': resnet10, "):
        make_encoder("vit")


@pytest.mark.parametrize("size", [(8, 8), (33, 40), (48, 64), (64, 48)])
def test_the_cnn_of_policies(size):
    cnn = make_encoder("cnn", in_channels=6, image_size=size)
    assert cnn(torch.zeros(2, 6, *size)).shape == (2, cnn.num_features)
    names = [f"{layer}.{part}" for layer in (0, 2, 4) for part in ("weight", "bias")]
    assert list(cnn.state_dict()) == names  # as in saved policies
