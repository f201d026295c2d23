"""Grouping by storage: promotion, sharing, bytes, and masks that no plan touches."""

from dataclasses import dataclass, fields, replace

import pytest

from jaxattn.cache.plan import MERGE_RULES, CacheGroup, agreed, group_layers, merge_stores
from jaxattn.spec import LayerSpec, MaskSpec, StoreSpec

STORE = StoreSpec(page_size=16, num_kv_heads=1, head_dim=256, dtype="float32")


def layer(name, window=None, *, store=STORE, share=None):
    mask = MaskSpec(sliding_window=window)
    return LayerSpec(
        name=name, num_q_heads=4, scale=0.0625, mask=mask, store=store, share_kv_from=share
    )


def layers_of(*windows):
    return tuple(layer(f"layer{index}", window) for index, window in enumerate(windows))


def shapes(plan):
    """(retention, layers) of every group."""
    return [(group.store.retention, group.layers) for group in plan.groups]


GEMMA = layers_of(*(None if index % 6 == 5 else 512 for index in range(18)))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([512, 512], 512),
        ([None, None], None),
        ([512, None], None),
        ([None, 512], None),
        ([512, 1024, 512], None),
        ([], None),
        ([0, 0], 0),
    ],
)
def test_agreed_assumes_nothing_unless_all_agree(values, expected):
    assert agreed(iter(values)) == expected


@pytest.mark.parametrize(
    ("windows", "hybrid", "retention", "window"),
    [
        ((512, 512), True, 512, 512),
        ((512, 512), False, None, 512),
        ((None, None), True, None, None),
        ((512, None), False, None, None),
    ],
)
def test_the_shapes_of_one_group(windows, hybrid, retention, window):
    plan = group_layers(layers_of(*windows), hybrid=hybrid, max_len=4096)
    assert shapes(plan) == [(retention, ("layer0", "layer1"))]
    assert agreed(reader.mask.sliding_window for reader in plan.readers(0)) == window


def test_a_group_has_no_field_for_what_a_layer_sees():
    assert [field.name for field in fields(CacheGroup)] == ["store", "layers"]
    assert {field.name for field in fields(StoreSpec)}.isdisjoint(
        field.name for field in fields(MaskSpec)
    )


@pytest.mark.parametrize("hybrid", [True, False])
def test_masks_are_untouched(hybrid):
    plan = group_layers(list(GEMMA), hybrid=hybrid, max_len=8192)
    assert plan.layers == GEMMA
    assert [each.mask.sliding_window for each in plan.layers[4:7]] == [512, None, 512]
    assert len(plan.groups) == (2 if hybrid else 1)
    assert plan == group_layers(GEMMA, hybrid=hybrid, max_len=8192)
    assert hash(plan) == hash(group_layers(GEMMA, hybrid=hybrid, max_len=8192))


def test_two_windows_are_two_groups_and_one_when_hybrid_is_off():
    layers = layers_of(64, 128, None, 64)
    assert shapes(group_layers(layers, max_len=1024)) == [
        (64, ("layer0", "layer3")),
        (128, ("layer1",)),
        (None, ("layer2",)),
    ]
    plan = group_layers(layers, hybrid=False, max_len=1024)
    assert shapes(plan) == [(None, ("layer0", "layer1", "layer2", "layer3"))]


def test_groups_are_in_the_order_of_their_first_layer():
    plan = group_layers(layers_of(None, 64, None), max_len=1024)
    assert shapes(plan) == [(None, ("layer0", "layer2")), (64, ("layer1",))]
    assert [plan.group_of(f"layer{index}") for index in range(3)] == [0, 1, 0]


@pytest.mark.parametrize("max_len", [511, 512, 513])
def test_a_window_that_reaches_max_len_plans_as_full(max_len):
    plan = group_layers(layers_of(512, None), max_len=max_len)
    assert len(plan.groups) == (2 if max_len == 513 else 1)
    assert plan.groups[0].store.retention == (512 if max_len == 513 else None)


def test_a_stated_retention_is_kept_and_promoted_with_the_rest():
    layers = (layer("a", 64, store=replace(STORE, retention=80)), layer("b", 64))
    assert shapes(group_layers(layers, max_len=1024)) == [(80, ("a",)), (64, ("b",))]
    assert shapes(group_layers(layers, max_len=80)) == [(None, ("a",)), (64, ("b",))]
    assert shapes(group_layers(layers, hybrid=False, max_len=1024)) == [(None, ("a", "b"))]


@pytest.mark.parametrize("mask", [{"image_rule": "extend"}, {"causal": False}, {"soft_cap": 5.0}])
def test_only_the_window_of_a_mask_decides_what_is_kept(mask):
    other = replace(layer("b"), mask=MaskSpec(sliding_window=64, **mask))
    assert shapes(group_layers((layer("a", 64), other), max_len=1024)) == [(64, ("a", "b"))]


@pytest.mark.parametrize(
    "change", [{"page_size": 8}, {"num_kv_heads": 2}, {"head_dim": 128}, {"dtype": "bfloat16"}]
)
@pytest.mark.parametrize("hybrid", [True, False])
def test_another_geometry_is_another_group_and_cannot_be_shared(change, hybrid):
    other = replace(STORE, **change)
    plan = group_layers((layer("a"), layer("b", store=other)), hybrid=hybrid, max_len=64)
    assert [group.store for group in plan.groups] == [STORE, other]
    sharing = (layer("a"), layer("b", store=other, share="a"))
    with pytest.raises(ValueError, match=f"need one {next(iter(change))}, got {{'a': .*'b': "):
        group_layers(sharing, hybrid=hybrid, max_len=64)


def test_sharing_layers_store_nothing_and_resolve_through_chains():
    layers = (*layers_of(64, None), layer("x", 64, share="layer0"), layer("y", 64, share="x"))
    plan = group_layers(layers, max_len=1024)
    assert shapes(plan) == [(64, ("layer0",)), (None, ("layer1",))]
    assert [plan.storage_of(each.name) for each in layers] == ["layer0", "layer1"] + ["layer0"] * 2
    assert [plan.group_of(each.name) for each in layers] == [0, 1, 0, 0]
    assert [each.name for each in plan.readers(0)] == ["layer0", "x", "y"]
    assert plan.bytes_per_token(0) == 2 * 256 * 4


@pytest.mark.parametrize(
    ("donor", "sharing", "retention"), [(64, 128, 128), (128, 64, 128), (64, None, None)]
)
def test_a_donor_keeps_what_its_widest_reader_needs(donor, sharing, retention):
    layers = (layer("a", donor), layer("b", sharing, share="a"), layer("c", 64))
    plan = group_layers(layers, max_len=1024)
    assert shapes(plan) == [(retention, ("a",)), (64, ("c",))]
    assert plan.layers == layers
    seen = {64: 64, 128: 128, None: 1000}
    assert plan.ideal_bytes(1000) == 2048 * (max(seen[donor], seen[sharing]) + 64)


def test_groups_that_a_reader_widens_alike_are_one():
    layers = (layer("a", 64), layer("b"), layer("c", share="a"))
    assert shapes(group_layers(layers, max_len=1024)) == [(None, ("a", "b"))]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), "layers is empty"),
        ((layer("a"), layer("a", 64)), "layer 'a': two layers have this name"),
        ((layer("a"), layer("b", share="z")), "share_kv_from='z' is not an earlier.*earlier are a"),
        ((layer("a", share="b"), layer("b")), "share_kv_from='b' is not an earlier.*are none"),
        ((layer("a", share="a"),), "layer 'a': share_kv_from='a' is not an earlier layer"),
        ((layer("a", share="b"), layer("b", share="a")), "layer 'a': share_kv_from='b' is not"),
    ],
)
def test_layers_that_cannot_be_planned(layers, message):
    with pytest.raises(ValueError, match=message):
        group_layers(layers, max_len=64)


def test_lengths_and_names_that_are_not_planned():
    with pytest.raises(ValueError, match="max_len=0: expected at least 1"):
        group_layers(GEMMA, max_len=0)
    plan = group_layers(GEMMA, max_len=1024)
    with pytest.raises(ValueError, match=r"layer_name='head' is not planned: .* layer0, layer1"):
        plan.group_of("head")
    with pytest.raises(ValueError, match=r"max_len=1025 is longer than the plan's max_len=1024"):
        plan.bytes_per_sequence(1025)
    with pytest.raises(ValueError, match="max_len=0: expected at least 1"):
        plan.ideal_bytes(0)


def test_a_field_without_a_merge_rule_is_an_error(monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class PackedStore(StoreSpec):
        pack_bits: int = 4

    packed = PackedStore(page_size=16, num_kv_heads=1, head_dim=64, dtype="int8")
    with pytest.raises(TypeError, match=r"no merge rule for \['pack_bits'\]"):
        group_layers((layer("a", store=packed),), max_len=64)
    assert MERGE_RULES.keys() == {field.name for field in fields(StoreSpec)}
    monkeypatch.delitem(MERGE_RULES, "retention")
    with pytest.raises(TypeError, match=r"no merge rule for \['retention'\]"):
        merge_stores({"a": STORE})


@pytest.mark.parametrize(
    ("dtype", "token_bytes"),
    [("float32", 2048), ("bfloat16", 1024), ("int8", 520), ("float8_e4m3fn", 520)],
)
def test_bytes_count_keys_values_and_scales(dtype, token_bytes):
    store = replace(STORE, dtype=dtype, num_kv_heads=2, page_size=8)
    plan = group_layers((layer("a", store=store), layer("b", store=store)), max_len=64)
    assert plan.bytes_per_token(0) == 2 * 2 * token_bytes  # layers, kv heads
    assert plan.page_bytes(0) == 8 * 2 * 2 * token_bytes


def test_bytes_of_gemma_3_270m_at_8192_tokens():
    grouped = group_layers(GEMMA, max_len=32768)
    uniform = group_layers(GEMMA, hybrid=False, max_len=32768)
    assert [group.store.retention for group in grouped.groups] == [512, None]
    assert [grouped.page_bytes(group) for group in (0, 1)] == [15 * 32768, 3 * 32768]
    assert uniform.bytes_per_sequence(8192) == 301_989_888  # 18 layers x 8192 tokens x 2 KiB
    assert grouped.bytes_per_sequence(8192) == 66_060_288  # 3 x 8192 + 15 x 512
    # while token 8190 is decoded, token 7679 is still seen: the last of a 33rd page
    assert grouped.bytes_per_sequence(8191) == 66_060_288 + 15 * 32768
    # token 8192 starts a page in every layer
    assert grouped.bytes_per_sequence(8193) == 66_060_288 + 18 * 32768
    for length in (8192, 8193, 8200):
        assert uniform.bytes_per_sequence(length) >= 4 * grouped.bytes_per_sequence(length)
        assert uniform.ideal_bytes(length) == grouped.ideal_bytes(length)
    assert grouped.ideal_bytes(8193) == 2048 * (3 * 8193 + 15 * 512)
    assert grouped.waste(8192) == 0
    assert uniform.waste(8192) == 1 - 66_060_288 / 301_989_888


@pytest.mark.parametrize("length", [1, 15, 16, 17, 511, 512, 513, 527, 528, 529, 1024])
def test_waste_is_at_most_the_pages_at_the_two_ends(length):
    plan = group_layers(GEMMA, max_len=1024)
    extra = plan.bytes_per_sequence(length) - plan.ideal_bytes(length)
    assert 0 <= extra <= 15 * (2 * 16 - 2) * 2048 + 3 * 15 * 2048


def test_a_plan_prints_itself():
    layers = (*GEMMA, layer("twin", 512, share="layer0"))
    text = str(group_layers(layers, max_len=8192))
    assert "15 windowed (512), 1 sharing" in text and "3 global" in text
    assert "512 tokens" in text and "all" in text
    assert "480 KiB" in text and "63 MiB" in text  # a page of group 0, a sequence of 8192
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "82.0%" in str(group_layers(GEMMA, hybrid=False, max_len=32768))
    assert "1 windowed (4)" in str(group_layers(layers_of(4), max_len=1))  # the smallest plan
