"""Configuration: origins, precedence, flags, refusals (trap 23), inert keys (case CF-03), text and back."""

import dataclasses
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_gym import config as conf
from sao_gym.config import InertRule, Origin, setting
from sao_gym.errors import ConfigError, InvariantError


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How weights move."""

    lr: float = setting(1e-6, help="learning rate", source="paper")
    grad_clip: float | None = setting(1.0, help="largest norm; null: off")
    warmup_steps: int = setting(0, help="batches of warm-up")

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise ConfigError(f"lr = {self.lr}: give at least 0")


@dataclass(frozen=True, kw_only=True)
class Model:
    """What learns."""

    path: str = setting(help="folder of a checkpoint", alias="model")
    train: str | list[str] = setting("mlp_only", help="what trains")
    options: dict[str, Any] = setting({}, help="more")
    layers: list[int] = setting([1, 2], help="layers")
    mode: Literal["fast", "slow"] = setting("fast", help="how")
    size: int = setting(8, help="how large", choices=(8, 16))


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run."""

    batch_size: int = setting(128, help="rows", source="paper", alias="batch-size")
    check: bool = setting(True, help="check promises", alias="check")
    note: str | None = setting(None, help="a note")
    model: Model = dataclasses.field(default_factory=Model)  # type: ignore[arg-type]
    actor: Optimizer = dataclasses.field(default_factory=Optimizer)
    critic: Optimizer = dataclasses.field(default_factory=Optimizer)


BASE = ("--model", "m")


def run(*flags: str, **sources: Any) -> conf.Resolved[Run]:
    return conf.resolve(Run, overrides=[*BASE, *flags], **sources)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_precedence_and_origins(tmp_path: Path) -> None:
    preset = write(tmp_path / "p.toml", "batch_size = 16\ncheck = false\n[actor]\nlr = 1e-3\ngrad_clip = 'null'\n")
    file = write(tmp_path / "f.toml", "[actor]\nlr = 1e-4\nwarmup_steps = 3\n")
    got = run("--actor.warmup-steps", "5", preset=preset, files=[file])
    assert got.config.batch_size == 16
    assert got.config.actor == Optimizer(lr=1e-4, grad_clip=None, warmup_steps=5)
    assert got.config.critic == Optimizer()
    origins = {key: got.origins[key] for key in ("batch_size", "actor.lr", "actor.warmup_steps", "critic.lr", "note")}
    assert list(origins.values()) == [Origin.PRESET, Origin.USER, Origin.USER, Origin.PAPER, Origin.OURS]
    assert got.wheres["actor.lr"] == f"{file}, key actor.lr"
    assert got.wheres["actor.warmup_steps"] == "--actor.warmup-steps"
    assert set(got.origins) == set(conf.Schema.of(Run).settings)


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--actor.lr", "1e-4"], "actor.lr", 1e-4),
        (["--actor.lr=.5"], "actor.lr", 0.5),
        (["--actor.lr", "1", "--actor.lr", "2"], "actor.lr", 2.0),
        (["--actor.grad_clip", "none"], "actor.grad_clip", None),
        (["--actor.grad-clip=null"], "actor.grad_clip", None),
        (["--batch-size", "4"], "batch_size", 4),
        (["--batch_size=4"], "batch_size", 4),
        (["--no-check"], "check", False),
        (["--no-check", "--check"], "check", True),
        (["--check", "false"], "check", False),
        (["--check=true"], "check", True),
        (["--note", "-1"], "note", "-1"),
        (["--note", "a = b"], "note", "a = b"),
        (["--note=null"], "note", None),
        (["--model.train", "full"], "model.train", "full"),
        (["--model.train", '["a", "b"]'], "model.train", ["a", "b"]),
        (["--model.layers", "3,4"], "model.layers", [3, 4]),
        (["--model.layers=[]"], "model.layers", []),
        (["--model.options.pool", "null", "--model.options.n=3"], "model.options", {"pool": None, "n": 3}),
        (["--model.options", "{a = 1}"], "model.options", {"a": 1}),
        (["--model.mode", "slow"], "model.mode", "slow"),
        (["--model.size", "16"], "model.size", 16),
    ],
)
def test_flags(flags: list[str], key: str, value: Any) -> None:
    got = run(*flags)
    assert conf.value_at(got.config, key) == value
    assert got.origins[key] is Origin.USER


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--actor.lrr", "1"], r"--actor\.lrr: there is no setting 'actor\.lrr'.*actor\.lr"),
        (["--lr", "1"], r"Did you mean actor\.lr or critic\.lr"),
        (["--batchsize", "1"], r"batch_size"),
        (["--actor.warmup", "1"], r"Did you mean actor\.warmup_steps\?"),
        (["--batch-sise", "1"], r"Did you mean batch_size\?"),
        (["--actor.zzz", "1"], r"Keys there: actor\.lr, actor\.grad_clip"),
        (["--zzz", "1"], r"--help"),
        (["--batch-size", "x"], r"--batch-size: batch_size is a whole number, got 'x'"),
        (["--batch-size", "1.5"], r"whole number"),
        (["--batch-size"], r"needs a value"),
        (["--batch-size", "--check"], r"needs a value"),
        (["--actor.lr", "nan"], r"a number, got nan"),
        (["--no-check=1"], r"takes no value"),
        (["--no-batch-size"], r"there is no setting"),
        (["--model.mode", "medium"], r"fast or slow, got 'medium'"),
        (["--model.size", "9"], r"one of 8, 16, got 9"),
        (["--model.layers", "a"], r"model\.layers is a list"),
        (["--actor", "1"], r"section of settings.*actor\.lr"),
        (["stray"], r"unexpected argument 'stray'"),
        (["--actor.lr=-1"], r"actor\.lr = -1\.0: give at least 0 \(from --actor\.lr\)"),
    ],
)
def test_refused_flags(flags: list[str], says: str) -> None:
    # trap 23
    with pytest.raises(ConfigError, match=says):
        run(*flags)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batchsize = 3", r"p\.toml, key batchsize: there is no setting.*batch_size"),
        ("[acter]\nlr = 1.0", r"key acter: there is no setting"),
        ("[actor]\nlr = 'fast'", r"key actor\.lr: actor\.lr is a number, got 'fast'"),
        ("[actor]\nlr = true", r"actor\.lr is a number, got True"),
        ("batch_size = '3'", r"batch_size is a whole number, got '3'"),
        ("actor = 3", r"actor is a section of settings, got 3"),
        ("[batch_size]\nx = 1", r"batch_size is a whole number"),
        ("check = 'null'", r"check is true or false"),
        ("a = = 1", r"not valid TOML.*line 1"),
        ("[critic]\nlr = -1", r"critic\.lr = -1\.0.*key critic\.lr"),
    ],
)
def test_refused_files(tmp_path: Path, text: str, says: str) -> None:
    # trap 23
    with pytest.raises(ConfigError, match=says):
        run(preset=write(tmp_path / "p.toml", text))
    with pytest.raises(ConfigError, match="cannot read"):
        run(preset=tmp_path / "none.toml")


def test_a_value_that_must_be_given() -> None:
    with pytest.raises(ConfigError, match=r"model\.path must be given: --model"):
        conf.resolve(Run)


RULES = (
    InertRule("critic", lambda run: run.model.mode == "slow", "model.mode is slow, which has no critic"),
    InertRule("actor.warmup_steps", lambda run: run.actor.lr == 0, "actor.lr is 0"),
)


def test_inert_keys(tmp_path: Path) -> None:
    # case CF-03: refused from the user, by key and reason; marked but allowed from a preset or a default.
    with pytest.raises(ConfigError, match=r"--critic\.lr: critic\.lr would have no effect.*model\.mode is slow"):
        run("--model.mode", "slow", "--critic.lr", "1", rules=RULES)
    file = write(tmp_path / "f.toml", "[actor]\nwarmup_steps = 1")
    with pytest.raises(ConfigError, match=r"f\.toml, key actor\.warmup_steps.*actor\.lr is 0"):
        run("--actor.lr", "0", files=[file], rules=RULES)
    preset = write(tmp_path / "p.toml", "[critic]\nlr = 1.0\n[model]\nmode = 'slow'")
    got = run(preset=preset, rules=RULES)
    assert got.inert == dict.fromkeys(("critic.lr", "critic.grad_clip", "critic.warmup_steps"), RULES[0].reason)
    assert "lr = 1.0" in conf.dump(got)
    assert "# preset; inert: model.mode is slow" in conf.dump(got)
    assert run("--critic.lr", "1", rules=RULES).inert == {}
    with pytest.raises(InvariantError, match="names no setting"):
        run(rules=[InertRule("critics", lambda _: True, "")])


def test_dump_names_origins() -> None:
    text = conf.dump(run("--actor.lr", "1e-4"))
    lines = {line.split(" = ")[0]: line for line in text.split("[critic]")[0].splitlines()}
    assert lines["lr"].endswith("# user (--actor.lr)")
    assert lines["batch_size"].endswith("# paper")
    assert lines["note"].startswith('note = "null"')


@given(
    note=st.none() | st.text().filter(lambda text: text != "null"),
    options=st.dictionaries(st.text(), st.none() | st.text() | st.integers(-(2**60), 2**60) | st.lists(st.booleans())),
    lr=st.floats(0, 1e300),
    train=st.text().filter(lambda text: text != "null") | st.lists(st.text()),
)
def test_a_dump_reads_back(tmp_path_factory: Any, note: Any, options: Any, lr: float, train: Any) -> None:
    model = Model(path="m", options=options, train=train)
    config = Run(note=note, model=model, actor=Optimizer(lr=lr))
    origins = dict.fromkeys(conf.Schema.of(Run).settings, Origin.USER)
    text = conf.dump(conf.Resolved(config=config, origins=origins, wheres={}, inert={}))
    path = write(tmp_path_factory.getbasetemp() / "dump.toml", text)
    assert conf.resolve(Run, preset=path).config == config


def test_changes() -> None:
    before, after = run().config, run("--actor.lr", "1", "--no-check").config
    assert [str(change) for change in conf.changes(before, after)] == [
        "check: True -> False",
        "actor.lr: 1e-06 -> 1.0",
    ]


def test_help() -> None:
    text = conf.help_text(Run, "python -m sao_gym.x", ["small"], [("--out DIR", "run folder")])
    for line in (
        "presets: small",
        "  --out DIR                             run folder",
        "  --batch-size                          rows [128, paper]",
        "actor  How weights move.",
        "  --actor.grad-clip                     largest norm; null: off [1.0, ours]",
        "  --model, --model.path                 folder of a checkpoint [must be given]",
    ):
        assert line in text.splitlines()
    described = {leaf.key for leaf in conf.Schema.of(Run).settings.values() if leaf.help in text}
    assert described == set(conf.Schema.of(Run).settings)


def test_presets_by_name(tmp_path: Path) -> None:
    write(tmp_path / "small.toml", "")
    assert conf.preset_names(tmp_path) == ["small"]
    assert conf.find_preset(tmp_path, "small") == tmp_path / "small.toml"
    assert conf.find_preset(tmp_path, "my/own.toml") == Path("my/own.toml")
    with pytest.raises(ConfigError, match="no preset 'smal'; presets: small"):
        conf.find_preset(tmp_path, "smal")


def test_one_flag_for_two_settings_is_a_bug() -> None:
    @dataclass(frozen=True)
    class Twice:
        a: int = setting(1, help="", alias="x")
        b: int = setting(1, help="", alias="x")

    with pytest.raises(InvariantError, match="share the flag --x"):
        conf.Schema.of(Twice)


def test_configuration_is_torch_free() -> None:
    code = "import sao_gym.config, sao_gym.runfolder, sao_gym.commands.main, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_files_that_editors_and_accidents_leave(tmp_path: Path) -> None:
    """A byte order mark and CRLF are read; what the parser cannot hold is one sentence."""
    path = tmp_path / "a.toml"
    path.write_bytes(b'\xef\xbb\xbf[model]\r\npath = "m"\r\nsize = 16\r\n')
    assert conf.resolve(Run, files=[path]).config.model.size == 16
    for text in (f"steps = {'9' * 5000}", f"steps = {'[' * 5000}"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"a\.toml is not valid TOML"):
            conf.resolve(Run, files=[path])


def test_whole_numbers_have_64_bits() -> None:
    with pytest.raises(ConfigError, match=r"at most 64 bits, got 9223372036854775808"):
        conf.resolve(Run, overrides=["--model", "m", "--model.size", str(2**63)])


@pytest.mark.parametrize("text", ["2026-01-02", "07:32:00", "1\ny = 2", "9" * 5000, "[" * 5000, "a=b"])
def test_a_value_inside_a_table_that_is_no_json_stays_text(text: str) -> None:
    run = conf.resolve(Run, overrides=["--model", "m", f"--model.options.x={text}"])
    assert run.config.model.options == {"x": text}
