"""The commands, called in this process; signals and pipes in processes of their own."""

import io
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxattn import LLM, SamplingParams, support_table
from jaxattn.cli import main
from tests import tiny_model
from tests.tiny_model import NUM_TENSORS

ROOT = Path(__file__).parent.parent
OPTIONS = ["--dtype", "float32", "--ignore-eos", "--max-model-len", "128"]
SHORT = [*OPTIONS, "--max-tokens", "12"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory):
    return str(tiny_model.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture(autouse=True)
def compilation_cache_elsewhere(home, monkeypatch):
    monkeypatch.setenv("HOME", str(home))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def expected(gguf_path):
    """`expected(prompt)`: what the CLI's greedy 12 tokens are."""
    llm = LLM(gguf_path, dtype="float32", max_model_len=128, max_num_seqs=1, progress=False)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    return lambda prompt: llm.generate(prompt, params)[0].outputs[0].text


# A test run in the background ignores Ctrl-C, and hands that down to its children.
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from jaxattn.cli import main
sys.exit(main())
"""


def start(*arguments, stdin=subprocess.DEVNULL):
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        cwd=ROOT,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def assert_error(capsys, message):
    """One line on standard error, nothing on standard output."""
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("jaxattn: error: ") and message in last
    assert "Traceback" not in err
    assert [line for line in err.splitlines() if "loading" not in line and line.strip()] == [last]


def test_generate(gguf_path, expected, capsys):
    assert main(["generate", "the hen", "--model", gguf_path, *SHORT]) == 0
    out, err = capsys.readouterr()
    assert out == "the hen" + expected("the hen") + "\n"
    lines = [line for line in err.splitlines() if line.strip()]
    assert lines[0].startswith("loading") and f"{2 * NUM_TENSORS}/{2 * NUM_TENSORS}" in lines[0]
    assert lines[1].startswith("loaded in ") and "first token after " in lines[1]
    assert "12 tokens, " in lines[1] and lines[1].endswith(" tokens/s")
    assert len(lines) == 2


@pytest.mark.parametrize("text", ["the hen", "the hen\n"])
def test_generate_from_standard_input(gguf_path, expected, capsys, monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["generate", "--model", gguf_path, *SHORT]) == 0
    assert capsys.readouterr().out == "the hen" + expected("the hen") + "\n"


def test_chat_prints_the_answer_alone(gguf_path, expected, capsys):
    assert main(["generate", "the hen", "--chat", "--model", gguf_path, *SHORT]) == 0
    prompt = "<start_of_turn>user\nthe hen<end_of_turn>\n<start_of_turn>model\n"
    assert capsys.readouterr().out == expected(prompt) + "\n"


def test_stop_may_be_repeated(gguf_path, expected, capsys):
    text = expected("the hen")
    stops = ["--stop", text[6], "--stop", text[3]]
    assert main(["generate", "the hen", "--model", gguf_path, *SHORT, *stops]) == 0
    cut = min(text.index(text[6]), text.index(text[3]))
    assert capsys.readouterr().out == "the hen" + text[:cut] + "\n"


def test_one_token(gguf_path, capsys):
    assert main(["generate", "a", "--model", gguf_path, *OPTIONS, "--max-tokens", "1"]) == 0
    assert "1 tokens\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("--temperature", "0.5", "temperature"),
        ("--top-k", "3", "top_k"),
        ("--top-p", "0.5", "top_p"),
        ("--min-p", "0.25", "min_p"),
        ("--seed", "9", "seed"),
        ("--repetition-penalty", "1.5", "repetition_penalty"),
        ("--max-tokens", "7", "max_tokens"),
    ],
)
def test_sampling_options_arrive(option, value, name, monkeypatch):
    asked = []

    class Recorder:
        def __init__(self, *arguments, **options):
            pass

        def stream(self, text, params):
            asked.append(params)
            raise ValueError("enough")

    monkeypatch.setattr("jaxattn.engine.llm.LLM", Recorder)
    assert main(["generate", "a", option, value]) == 1
    assert getattr(asked[0], name) == float(value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "~nobody-here/x"], "'~nobody-here/x': Could not determine home"),
        (["--model", "/no/such/file.gguf"], "'/no/such/file.gguf' is neither a file nor a folder"),
        (["--model", "BROKEN"], "is not a GGUF file"),
        (["--model", "TRUNCATED"], "truncated"),
        (["--max-tokens", "0"], "max_tokens=0: expected at least 1"),
        (["--top-p", "2"], "top_p=2.0: expected above 0 and at most 1"),
        (["--temperature", "nan"], "temperature=nan"),
        (["--backend", "cuda"], "backend='cuda': the backends are"),
        (["--backend", "pallas_tpu"], "pallas_tpu: on cpu (cpu): supported: platform tpu"),
        (["--max-model-len", "5"], "leaves room for 4 and one new token: shorten the prompt"),
        (["--max-model-len", "100000"], "the model's positions end at 4096"),
        (["--stop", ""], "expected non-empty strings"),
    ],
)
def test_errors_are_one_line(gguf_path, tmp_path, capsys, arguments, message):
    broken, truncated = tmp_path / "broken.gguf", tmp_path / "truncated.gguf"
    broken.write_bytes(b"not a model")
    truncated.write_bytes(Path(gguf_path).read_bytes()[:-1000])
    names = {"BROKEN": str(broken), "TRUNCATED": str(truncated)}
    arguments = [names.get(each, each) for each in arguments]
    if "--model" not in arguments:
        arguments += ["--model", gguf_path]
    assert main(["generate", "the hen in there", *arguments]) == 1
    assert_error(capsys, message)


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_prompt(gguf_path, capsys, monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["generate", "--model", gguf_path]) == 1
    assert_error(capsys, "the prompt is empty")
    assert main(["generate", "", "--model", gguf_path]) == 1
    assert_error(capsys, "the prompt is empty")


def test_a_terminal_is_not_waited_for(gguf_path, capsys, monkeypatch):
    terminal = io.StringIO("typed")
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(["generate", "--model", gguf_path]) == 1
    assert_error(capsys, "no prompt: give it as an argument or on standard input")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "command"),
        (["sing"], "invalid choice: 'sing'"),
        (["generate", "a", "--max-tokens", "many"], "invalid int value: 'many'"),
        (["generate", "a", "--loud"], "unrecognized arguments: --loud"),
        (["generate", "a", "--dtype", "float16"], "invalid choice: 'float16'"),
    ],
)
def test_usage(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_plan_shows_hybrid_on_and_off(capsys):
    assert main(["plan", "--model", "gemma-3-27b", "--max-len", "4096", "--batch", "2"]) == 0
    on, off = capsys.readouterr().out.split("gemma-3-27b, hybrid cache ")[1:]
    assert on.startswith("on") and off.startswith("off")
    assert "windowed (1024)" in on and "1024 tokens" in on
    assert "1024 tokens" not in off
    sizes = [
        float(part.split("in flight: ")[1].split(" MiB")[0].replace(",", "")) for part in (on, off)
    ]
    per_token = 62 * 2 * 16 * 128 * 2  # layers, K and V, kv heads, head dim, bytes of bfloat16
    assert sizes[1] == pytest.approx(2 * 4096 * per_token / 2**20, rel=1e-3)
    assert sizes[0] < 0.6 * sizes[1]


def test_plan_of_a_file(gguf_path, capsys):
    assert main(["plan", "--model", gguf_path, "--max-len", "64", "--page-size", "4"]) == 0
    assert "8 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-size", "0"], "page_size=0: expected at least 1"),
        (["--max-len", "-1"], "max_len=-1: expected at least 1"),
        (["--batch", "0"], "max_num_seqs=0: expected at least 1"),
        (["--kv-dtype", "int4"], "dtype='int4': a cache stores one of"),
        (
            ["--model", "gemma-9"],
            "'gemma-9' is neither a file nor a folder nor one of ['gemma-3-270m'",
        ),
    ],
)
def test_plan_errors(capsys, arguments, message):
    assert main(["plan", *arguments]) == 1
    assert_error(capsys, message)


def test_support(capsys):
    assert main(["support"]) == 0
    assert capsys.readouterr().out == support_table()


def test_a_process_of_its_own(gguf_path, expected):
    process = start("generate", "--model", gguf_path, *SHORT, stdin=subprocess.PIPE)
    out, err = process.communicate(b"the hen\n", timeout=120)
    assert process.returncode == 0, err.decode()
    assert out.decode() == "the hen" + expected("the hen") + "\n"
    assert err.decode().rstrip().endswith(" tokens/s")
    assert "Warning" not in err.decode()


LONG = ["--dtype", "float32", "--ignore-eos", "--max-tokens", "4000"]


def test_control_c(gguf_path, expected):
    process = start("generate", "the hen", "--model", gguf_path, *LONG)
    begin = process.stdout.read(len("the hen") + 60)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=120)
    assert process.returncode == 130, err.decode()
    whole = (begin + rest).decode()  # also: not in the middle of a character
    assert whole.startswith("the hen" + expected("the hen"))
    assert len(whole) < 4000
    assert err.decode().endswith("\ninterrupted\n") and "Traceback" not in err.decode()


def test_a_reader_that_goes_away(gguf_path):
    process = start("generate", "the hen", "--model", gguf_path, *LONG)
    process.stdout.read(10)
    process.stdout.close()
    err = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=120) == 1
    assert [line for line in err.splitlines() if "loading" not in line and line.strip()] == []
