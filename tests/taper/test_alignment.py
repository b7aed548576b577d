"""The alignment tool against hand-made layers, our decoder taken apart, and transformers."""

import importlib.util
import io
import json
import math
from contextlib import redirect_stderr
from importlib.util import spec_from_file_location

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lmgeom.errors import ConfigError, DataError, LmgeomError
from lmgeom.lm import Config, LanguageModel
from lmgeom.lm.checkpoint import save
from lmgeom.study.paths import root
from lmgeom.taper import alignment, depth_correlation, widths, widths_by_alignment
from lmgeom.taper.alignment import find_blocks, measure

SCRIPT = root() / "tests" / "benchmarks" / "alignment.py"
script = importlib.util.module_from_spec(spec_from_file_location("alignment_script", SCRIPT))
script.__spec__.loader.exec_module(script)
CONFIG = Config(vocab_size=53, dim=32, layers=4, heads=4, context=24, mlp_width=48)


class Layer(nn.Module):
    """An MLP that is a matrix, after a mixer that adds nothing; `kind` says what is wrong."""

    def __init__(self, matrix, kind="right"):
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(len(matrix))
        self.mlp = nn.Linear(*matrix.shape, bias=False)
        self.mlp.weight = nn.Parameter(matrix)

    def forward(self, x):
        if self.kind == "parallel":
            return x + self.mlp(self.norm(x))
        if self.kind == "skipped":
            return x
        z = x + 0.0
        if self.kind == "addition in the MLP":
            return self.mlp(z)
        out = z + self.mlp(z)
        return self.norm(out) if self.kind == "post-norm" else out


class Stack(nn.Module):
    """Layers over a table."""

    def __init__(self, *layers):
        super().__init__()
        self.input, self.layers = nn.Embedding(9, 8), nn.ModuleList(layers)

    def forward(self, ids):
        x = self.input(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def hooks(model):
    """Number of forward hooks that hang on a model."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_known_directions():
    half = torch.eye(8) / 2
    turn = torch.zeros(8, 8)
    turn[:4, 4:], turn[4:, :4] = -torch.eye(4), torch.eye(4)
    found = alignment(Stack(Layer(half), Layer(-half), Layer(turn)), torch.randint(9, (3, 5)))
    expected = torch.tensor([1.0, -1, 0]).double().expand(3, 3)
    for cosine in (found.mlp, found.mlp_here, found.block):
        assert (cosine - expected).abs().max() < 1e-6
    ratio = found.mlp_norm / found.stream_norm
    assert (ratio - torch.tensor([0.5, 0.5, 1])).abs().max() < 1e-6
    assert (found.stream_norm[:, 1] / found.stream_norm[:, 0] - 1.5).abs().max() < 1e-6


def test_measure_is_a_mean_over_tokens():
    h, z, out = torch.randn(3, 2, 7, 5)
    found = measure(h, z, out)
    for b in range(2):
        cosines = [
            torch.dot(out[b, t] - z[b, t], h[b, t])
            / ((out[b, t] - z[b, t]).norm() * h[b, t].norm())
            for t in range(7)
        ]
        assert found["mlp"][b].item() == pytest.approx(sum(cosines).item() / 7, abs=1e-6)
    assert all(values.shape == (2,) for values in found.values())


def test_our_decoder_taken_apart():
    model, ids = LanguageModel(CONFIG).double(), torch.randint(53, (3, 24))
    found = alignment(model, ids)
    x = model.input(ids)
    for layer, block in enumerate(model.blocks):
        z = x + block.mixer(block.mixer_norm(x))
        push = block.mlp(block.mlp_norm(z))
        pairs = {"mlp": (push, x), "mlp_here": (push, z), "block": (z + push - x, x)}
        for name, (a, b) in pairs.items():
            expected = F.cosine_similarity(a, b, dim=-1).mean(-1)
            assert (getattr(found, name)[:, layer] - expected).abs().max() < 1e-12
        x = z + push


@pytest.mark.parametrize("kind", ["parallel", "post-norm", "skipped", "addition in the MLP"])
def test_layers_that_do_not_fit_are_refused_and_left_clean(kind):
    model = Stack(Layer(torch.eye(8)), Layer(torch.eye(8), kind)).train()
    with pytest.raises(ConfigError, match="Layer") as caught:
        alignment(model, torch.zeros(1, 3, dtype=torch.int64))
    assert "\n" not in str(caught.value)
    assert hooks(model) == 0
    assert model.training


class Sub(nn.Module):
    """Mixer, norm and MLP that are matrices; `kind` says how the layer puts them together."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(8)
        self.mixer, self.pre, self.mlp = (nn.Linear(8, 8) for _ in range(3))
        self.other = nn.Linear(8, 8)

    def forward(self, x):
        if self.kind == "all in place":
            x += self.mixer(x)
        else:
            x = x + self.mixer(x)
        if self.kind == "mixer in place":
            x = self.mixer(x)
            x += 1
        if self.kind == "two before":
            return x + self.mlp(self.pre(self.norm(x)))
        push = self.mlp(self.norm(x))
        if self.kind == "sum in the push":
            push += x
            return push
        if "in place" in self.kind:
            x += push
            return x
        scales = {"scaled push": 0.2, "negative push": -1, "scaled by coordinate": torch.arange(8)}
        out = x + scales.get(self.kind, 1) * push
        if self.kind == "scaled sum":
            out *= 0.5
        return out + self.other(out) if self.kind == "third branch" else out


def parts(layer, x):
    """What enters a `Sub`, its stream before the MLP, and what the MLP adds, by hand."""
    z = x + layer.mixer(x)
    if layer.kind == "mixer in place":
        z = layer.mixer(z) + 1
    normed = layer.norm(z)
    push = layer.mlp(layer.pre(normed) if layer.kind == "two before" else normed)
    return x, z, {"scaled push": 0.2, "negative push": -1}.get(layer.kind, 1) * push


SUMS = ["right", "in place", "all in place", "mixer in place", "sum in the push", "two before"]


@pytest.mark.parametrize("kind", [*SUMS, "scaled push", "negative push"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_of_every_kind_are_measured(kind, dtype):
    model, ids = Stack(*(Sub(kind) for _ in range(3))).to(dtype), torch.randint(9, (2, 5))
    found, x = alignment(model, ids), model.input(ids)
    error = 20 * torch.finfo(dtype).eps
    for depth, layer in enumerate(model.layers):
        h, z, push = parts(layer, x.detach())
        x = z + push
        for name, (a, b) in {"mlp": (push, h), "mlp_here": (push, z), "block": (x - h, h)}.items():
            expected = F.cosine_similarity(a.double(), b.double(), dim=-1).mean(-1)
            assert (getattr(found, name)[:, depth] - expected).abs().max() < error


@pytest.mark.parametrize("kind", ["scaled sum", "third branch", "scaled by coordinate"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_of_something_else_are_refused(kind, dtype):
    model = Stack(Sub("right"), Sub(kind)).to(dtype)
    with pytest.raises(ConfigError, match="Sub: must add to the stream that its MLP reads"):
        alignment(model, torch.randint(9, (1, 5)))
    assert hooks(model) == 0


def test_a_norm_that_keeps_the_direction_is_not_the_stream():
    class Normed(Layer):
        def forward(self, x):
            z = x + 0.0
            return z + self.mlp(F.normalize(z) if self.kind == "no child" else self.norm(z))

    layers = [Normed(torch.eye(8) / 2), Normed(-torch.eye(8) / 2)]
    for layer in layers:
        layer.norm = nn.RMSNorm(8)
    found = alignment(Stack(*layers), torch.randint(9, (2, 5)))
    assert (found.mlp - torch.tensor([1.0, -1])).abs().max() < 1e-6


def test_another_name_and_a_missing_name():
    model = Stack(Layer(torch.eye(8)), Layer(torch.eye(8)))
    with pytest.raises(ConfigError, match=r"mlp='ffn'.*children: mlp, norm"):
        find_blocks(model, "ffn")
    with pytest.raises(ConfigError, match="children: none"):
        find_blocks(nn.Linear(2, 2))
    for layer in model.layers:
        layer.ffn = layer.mlp
    assert find_blocks(model, "ffn") == list(model.layers)


@pytest.mark.parametrize("name", ["forward", "kind"])
def test_an_attribute_is_not_a_child(name):
    model = Stack(Layer(torch.eye(8)))
    with pytest.raises(ConfigError, match="children: mlp, norm"):
        alignment(model, torch.zeros(1, 3, dtype=torch.int64), mlp=name)
    assert hooks(model) == 0


@pytest.mark.parametrize("ids", [torch.zeros(5), torch.zeros(0, 5), torch.zeros(2, 0), [[1]], None])
def test_ids_must_be_sequences_of_tokens(ids):
    with pytest.raises(DataError, match=r"shape \(sequences, tokens\)"):
        alignment(Stack(Layer(torch.eye(8))), ids)


def test_layers_that_run_twice_or_never_are_refused():
    layer, ids = Layer(torch.eye(8)), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ConfigError, match="layer 0: ran 4 times on 2 sequences"):
        alignment(Stack(layer, layer), ids)
    idle = Stack(Layer(torch.eye(8)), Layer(torch.eye(8)))
    idle.forward = lambda ids: idle.layers[0](idle.input(ids))
    with pytest.raises(ConfigError, match="layer 1: ran 0 times"):
        alignment(idle, ids)


def test_model_is_left_as_it_was():
    model, ids = LanguageModel(CONFIG).train(), torch.randint(53, (2, 8))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.blocks[1].mlp.eval()
    modes = [part.training for part in model.modules()]
    alignment(model, ids)
    assert [part.training for part in model.modules()] == modes
    assert {True, False} == set(modes)
    assert hooks(model) == 0
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


# ------------------------------------------------------------------ correlation
def test_correlation_with_depth():
    values = torch.randn(20)
    found = depth_correlation(values)
    assert found.r == pytest.approx(np.corrcoef(np.arange(20), values)[0, 1], abs=1e-12)
    assert found.low < found.r < found.high
    assert depth_correlation(values) == found
    assert depth_correlation(-values).r == pytest.approx(-found.r)
    line = depth_correlation(torch.arange(12) * 3.0 + 1)
    assert [round(value, 9) for value in line] == [1, 1, 1]
    assert max(depth_correlation(torch.arange(3))) <= 1
    assert depth_correlation(10 * values + 7).low == pytest.approx(found.low)


@pytest.mark.parametrize("shape", [(2,), (4, 3), ()])
def test_correlation_needs_three_layers(shape):
    with pytest.raises(ConfigError, match="a layer, 3 or more"):
        depth_correlation(torch.zeros(shape))


@pytest.mark.parametrize("values", [[1, 1, 1], [1, 2, math.nan], [1, 2, math.inf]])
def test_correlation_needs_finite_values_that_differ(values):
    with pytest.raises(ConfigError, match="must be finite and not all equal"):
        depth_correlation(torch.tensor(values, dtype=torch.float64))


@pytest.mark.parametrize("resamples", [0, -1, 1.5, True, 10**9])
def test_correlation_needs_resamples(resamples):
    with pytest.raises(ConfigError, match=r"resamples=.*: must be an integer from 1 to 100000"):
        depth_correlation(torch.arange(4), resamples=resamples)


@given(st.integers(1, 3), st.integers(0, 40), st.integers(3, 5))
def test_correlation_has_an_interval_or_is_refused(resamples, seed, layers):
    message, found = "none has a correlation", (0.0,)
    try:
        found = depth_correlation(torch.arange(layers), resamples=resamples, seed=seed)
    except ConfigError as error:
        message = str(error)
    assert "none has a correlation" in message
    assert all(-1 <= value <= 1 for value in found)


def test_resamples_of_one_layer_only_are_refused():
    with pytest.raises(ConfigError, match="resamples=1: none has a correlation with seed=11"):
        depth_correlation(torch.tensor([1.0, 2, 3]), resamples=1, seed=11)


@pytest.mark.parametrize("factor", [1e-300, 1e307])
def test_correlation_does_not_depend_on_the_unit(factor):
    values = torch.tensor([1.0, 4, 2, 8, 5], dtype=torch.float64)
    found, scaled = depth_correlation(values), depth_correlation(factor * values)
    assert scaled == pytest.approx(found, abs=1e-12)


# ------------------------------------------------------------------ rubbish
numbers = st.one_of(
    st.integers(), st.floats(), st.complex_numbers(), st.booleans(), st.text(max_size=3), st.none()
)
tensors = st.sampled_from(
    [
        torch.zeros(0),
        torch.arange(4),
        torch.tensor(3.0),
        torch.rand(4, dtype=torch.complex64),
        torch.rand(4) > 0.5,
        torch.rand(4).half().requires_grad_(),
        torch.rand(5, device="meta"),
        torch.rand(4).to_sparse(),
        torch.full((3,), 1e308, dtype=torch.float64),
        torch.tensor([1e308, -1e308, 0, 5], dtype=torch.float64),
        torch.randint(9, (2, 3)),
        torch.full((2, 3), 99),
        torch.full((2, 3), -1),
        torch.randint(9, (2, 3), dtype=torch.int16),
        torch.randint(9, (2, 3), dtype=torch.int32),
        torch.randint(9, (1, 2), device="meta"),
        torch.randint(9, (2, 3)).to_sparse(),
        torch.rand(2, 3),
    ]
)
rubbish = st.one_of(numbers, tensors, st.lists(numbers, max_size=4), st.just({}), st.just(object()))


def one_line(function, *args, **options):
    """Run a function that may refuse, in one line and with an error of ours."""
    message = ""
    try:
        function(*args, **options)
    except LmgeomError as error:
        message = str(error)
    assert "\n" not in message


@settings(max_examples=150, deadline=None)
@given(rubbish, rubbish, rubbish)
def test_correlation_refuses_rubbish_in_one_line(values, resamples, seed):
    one_line(depth_correlation, values, resamples=3, seed=seed)
    one_line(depth_correlation, torch.arange(4), resamples=resamples)


@settings(max_examples=150, deadline=None)
@given(rubbish, rubbish, rubbish)
def test_alignment_refuses_rubbish_in_one_line(model, ids, mlp):
    good = Stack(Layer(torch.eye(8)))
    one_line(alignment, model, ids, mlp=mlp)
    one_line(alignment, good, ids)
    one_line(alignment, good, torch.zeros(1, 2, dtype=torch.int64), mlp=mlp)
    assert hooks(good) == 0
    one_line(widths_by_alignment, ids, 512)


@pytest.mark.parametrize("ids", [torch.full((1, 3), 99), torch.full((1, 3), -1)])
def test_ids_beyond_the_vocabulary_are_refused_by_the_model(ids):
    with pytest.raises(DataError, match=r"ids of shape \(1, 3\): the model stops with IndexError"):
        alignment(Stack(Layer(torch.eye(8))), ids)


@pytest.mark.parametrize("output", [None, (), {}, torch.zeros(3)])
def test_layers_that_give_no_stream_are_refused(output):
    model = Stack(Layer(torch.eye(8)))
    model.layers[0].forward = lambda x: output
    with pytest.raises(ConfigError, match="must map a stream"):
        alignment(model, torch.zeros(1, 2, dtype=torch.int64))


def test_a_stream_that_is_not_finite_is_refused():
    model = Stack(Layer(torch.eye(8)), Layer(math.nan * torch.eye(8)))
    with pytest.raises(DataError, match="layer 1: its stream is not finite"):
        alignment(model, torch.zeros(1, 2, dtype=torch.int64))


# ------------------------------------------------------------------ widths
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12))
def test_widths_follow_alignment_at_the_budget_of_the_taper(values):
    sizes = widths_by_alignment(values, 512)
    assert sorted(sizes, reverse=True) == widths(len(values), 512)
    for a, wide in zip(values, sizes, strict=True):
        assert all(a <= b for b, narrow in zip(values, sizes, strict=True) if narrow < wide)


def test_rising_alignment_gives_the_taper_and_ties_go_by_depth():
    assert widths_by_alignment([0.1, 0.2, 0.3], 512, multiple=32) == widths(3, 512, multiple=32)
    assert widths_by_alignment([0.3, 0.2, 0.1], 512) == widths(3, 512)[::-1]
    assert widths_by_alignment([0, 0, 0], 512) == widths(3, 512)
    assert widths_by_alignment(list(np.linspace(0, 1, 3)), 512) == widths(3, 512)


@pytest.mark.parametrize(
    "values",
    [[0.1, math.nan], [0.1, 2], ["a", 0], [0.1, True], [], [0.5], None, 3, torch.rand(2, 3)],
)
def test_widths_need_a_cosine_of_each_layer(values):
    with pytest.raises(ConfigError, match=r"cosines|at least 2 layers|n_layers"):
        widths_by_alignment(values, 512)


def test_record_agrees_with_its_own_curves():
    record = json.loads((root() / "book/results/alignment/smollm2-135m.json").read_text())
    for name in script.CORRELATED:
        assert len(record[name]) == record["layers"]
        found = depth_correlation(torch.tensor(record[name]))
        for end, value in found._asdict().items():
            assert record[f"{name}_correlation_{end}"] == pytest.approx(value, abs=2e-3)
    assert record["loss"] < math.log(20), "a language model in working order"


# ------------------------------------------------------------------ other people's decoders
SIZES = {"vocab_size": 53, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
FAMILIES = {
    "Llama": SIZES | {"intermediate_size": 48, "num_key_value_heads": 2},
    "Qwen2": SIZES | {"intermediate_size": 48, "num_key_value_heads": 2},
    "GPT2": {"vocab_size": 53, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}
    | {"bos_token_id": 0, "eos_token_id": 0},
    "Gemma2": SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
    "Olmo2": SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": 0},
    "Granite": SIZES
    | {"intermediate_size": 48, "num_key_value_heads": 2, "residual_multiplier": 0.2},
}
NORMS = {"GPT2": "ln_2", "Gemma2": "pre_feedforward_layernorm", "Olmo2": "mlp"}


def decoder(family, **settings):
    """A small random decoder of transformers in float64."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_decoders_of_transformers(family):
    model, ids = decoder(family, **FAMILIES[family]), torch.randint(53, (2, 16))
    found = alignment(model, ids)
    blocks, seen = find_blocks(model), {}

    def keep(name):
        def hook(module, args, kwargs):
            seen[name] = (args[0] if args else kwargs["hidden_states"]).detach()

        return hook

    for i, block in enumerate(blocks):
        norm = getattr(block, NORMS.get(family, "post_attention_layernorm"))
        norm.register_forward_pre_hook(keep(f"z{i}"), with_kwargs=True)
    with torch.no_grad():
        streams = model(ids, output_hidden_states=True).hidden_states
    for i in range(len(blocks) - 1):  # the last hidden state has passed the final norm
        h, z, out = streams[i], seen[f"z{i}"], streams[i + 1]
        for name, (a, b) in {"mlp": (out - z, h), "mlp_here": (out - z, z)}.items():
            expected = F.cosine_similarity(a, b, dim=-1).mean(-1)
            assert (getattr(found, name)[:, i] - expected).abs().max() < 1e-10


def test_parallel_decoders_of_transformers_are_refused():
    sizes = SIZES | {"intermediate_size": 48, "use_parallel_residual": True}
    with pytest.raises(ConfigError, match="GPTNeoXLayer"):
        alignment(decoder("GPTNeoX", **sizes), torch.randint(53, (1, 8)))


GEMMA4 = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
GEMMA4 |= {"global_head_dim": 8, "num_kv_shared_layers": 0, "enable_moe_block": False}
GEMMA4 |= {"vocab_size_per_layer_input": 53, "pad_token_id": 0, "max_position_embeddings": 64}


@pytest.mark.parametrize(("branch", "scalar"), [(0, 0.5), (8, 1), (8, 0.5), (0, 1)])
def test_gemma4_is_measured_only_where_its_mlp_adds_last(branch, scalar):
    model = decoder("Gemma4Text", **GEMMA4, hidden_size_per_layer_input=branch)
    for block in find_blocks(model):
        block.layer_scalar.fill_(scalar)
    ids = torch.randint(53, (2, 16))
    if (branch, scalar) == (0, 1):
        assert alignment(model, ids).mlp.shape == (2, 3)
    else:
        with pytest.raises(ConfigError, match=r"Gemma4TextDecoderLayer: must add to the stream"):
            alignment(model, ids)


def test_script_measures_one_of_our_checkpoints(tmp_path, monkeypatch):
    save(tmp_path, 3, LanguageModel(CONFIG))
    monkeypatch.setattr(script, "windows", lambda encode, n, length: torch.randint(53, (n, length)))
    record = script.measure(str(tmp_path), 2, 16)
    assert (record["layers"], record["width"], record["text"][:8]) == (4, 32, "wiki_ood")


def test_script_measures_a_folder_of_transformers(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "tiny")
    decoder("GPT2", **FAMILIES["GPT2"]).float().save_pretrained(tmp_path / "tiny")
    monkeypatch.setattr(script, "windows", lambda encode, n, length: torch.randint(53, (n, length)))
    record = script.measure(str(tmp_path / "tiny"), 2, 16)
    assert (record["layers"], record["width"], record["weights"]) == (4, 32, "float32")
    assert record["loss"] == pytest.approx(math.log(53), abs=0.3)


def run(*words):
    """Exit status of the script, and its one line on standard error."""
    error = io.StringIO()
    with redirect_stderr(error):
        status = script.main(words)
    assert len(error.getvalue().splitlines()) == 1
    return status, error.getvalue()


def test_script_says_in_one_line_what_it_cannot_read(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")

    def offline(name, **options):
        raise OSError(f"no connection\nto load {name}")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", offline)
    status, text = run("gpt2", "--out", str(tmp_path))
    assert (status, list(tmp_path.iterdir())) == (2, [])
    assert "model 'gpt2' is no folder, and the Hub gives none: no connection to load gpt2" in text
    assert run(str(tmp_path), "--out", str(tmp_path / "records"))[0] == 2


@pytest.mark.parametrize("words", [("--windows", "1"), ("--tokens", "0"), ("--tokens", "x")])
def test_script_refuses_sizes_that_cannot_work(words, capsys):
    with pytest.raises(SystemExit) as caught:
        script.main(words)
    assert caught.value.code == 2
    assert f"{words[1]!r} is not an integer of at least 2" in capsys.readouterr().err


def test_the_chapter_and_the_ledger_have_the_command_of_the_script():
    command = " ".join(script.__doc__.split("    python")[1].split("\n\n")[0].split())
    words = f"python {command}".replace(" \\ ", " ")
    assert words.endswith("gpt2-xl --windows 2 --tokens 1024")
    for place in ("nbs/taper/04_alignment.ipynb", "book/claims.yaml"):
        assert words in (root() / place).read_text()
