"""What the engine's process and its client exchange: nothing is lost on the way, nothing malformed gets in."""

from __future__ import annotations

import dataclasses
import socket
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from engine import (
    FILTERS,
    AudioInput,
    ChoiceDelta,
    ConfigError,
    EngineConfig,
    EngineDeadError,
    EngineStats,
    InvalidRequestError,
    Logprob,
    ModelLoadError,
    OctavoError,
    PixelInput,
    PoolingParams,
    RequestDelta,
    RequestFailedError,
    SamplingParams,
    Seq2SeqInput,
    TokenInput,
    UnsupportedModelError,
)
from engine.interface.adapters import AdapterInfo
from engine.interface.outputs import BeamMove, BeamMoves, EngineInfo, Pooled
from engine.interface.reasoning import ReasoningBudget
from engine.interface.structured import StructuredOutputsParams
from engine.process.main import MOST_COMMANDS, Loop
from engine.process.messages import (
    Abort,
    AddRequest,
    Dismiss,
    Failed,
    JoinEngine,
    LoadAdapter,
    Loading,
    News,
    Ready,
    Signal,
    Start,
    Warm,
    decode_command,
    decode_news,
    encode,
    encode_add,
    receive_reply,
    receive_start,
    send_framed,
)

EVERYTHING = SamplingParams(
    **{column.name: 5 if column.allowed.integer else 0.1 for column in FILTERS if column.allowed},
    max_tokens=7, min_tokens=2, xtc_threshold=0.3, dry_multiplier=0.8, dry_base=1.5,
    dry_allowed_length=3, dry_penalty_last_n=64, dry_sequence_breakers=["\n", "é"], seed=2**64 - 1, n=3,
    allowed_token_ids=[8, 9],
    repetition_penalty=1.1, presence_penalty=-2.0, frequency_penalty=2.0, logit_bias={5: -100.0, 0: 0.1},
    stop=["a", "日本\n"], stop_token_ids=[1, 2], ignore_eos=True, include_stop_str_in_output=True,
    skip_special_tokens=False, logprobs=20, prompt_logprobs=0, num_beams=1, length_penalty=-0.5,
    early_stopping="never", no_repeat_ngram_size=3, min_length=4, suppress_tokens=[7], begin_suppress_tokens=[8],
    bad_words=["a", "é"], truncate_prompt_tokens=-1,
    bad_words_ids=[[11], [12, 13]], encoder_repetition_penalty=1.2, encoder_no_repeat_ngram_size=4,
    renormalize_logits=True, decoder_start_token_id=14, forced_bos_token_id=9, forced_eos_token_id=10,
    stream_beams=True, logprob_token_ids=[4, 2], predicted_token_ids=[5, 6],
)  # fmt: skip

# What cannot be asked for together with all that.
APART = {
    "spaces_between_special_tokens": SamplingParams(spaces_between_special_tokens=False),
    "structured_outputs": SamplingParams(structured_outputs=StructuredOutputsParams(json={"b": [1], "a": "é"})),
    "reasoning_budget": SamplingParams(
        reasoning_budget=ReasoningBudget(tokens=5, open=(3, 4), close=6, last_words=(1, 2), begun=True)
    ),
    "constraint": SamplingParams(constraint={"catalogue": "cities"}),
    "detokenize": SamplingParams(detokenize=False),
    "timestamps": SamplingParams(timestamps=True),
}

POOLING = PoolingParams(
    task="fill_mask", pooling="mean_sqrt_len", normalize=True, dimensions=7, use_activation=False, positions=[3, 1],
    words=[4, 2], threshold=0.25, top_k=9, skip_tokens=2, left_out=[5], attended=6,
    encoder_length=5,
)  # fmt: skip

VALUES = np.array([[0.1, -0.0, 1e-45], [3.4e38, -2.5, 1 / 3]], dtype=np.float32)
IDS = np.array([[0, 5, 2**31 - 1], [1, 2, 3]], dtype=np.int32)


def added(input: Any, params: Any, **terms: Any) -> AddRequest:
    command = decode_command(encode_add("id", input, params, **terms))
    assert isinstance(command, AddRequest)
    return command


@pytest.mark.parametrize(
    "params",
    [
        EVERYTHING,
        *APART.values(),
        SamplingParams(),
        SamplingParams(stop="one", early_stopping=True),
        SamplingParams(num_beams=4, n=2, early_stopping=False),
        PoolingParams(pooling="cls", normalize=False),
        POOLING,
    ],
    ids=["everything", *APART, "nothing", "one stop", "beams", "pooling", "all of pooling"],
)
def test_parameters(params: SamplingParams | PoolingParams) -> None:
    command = added([1, 2, 3], params, priority=-3, cache_salt="salt", deadline=12.5, tenant="t")
    assert command.params == params
    assert type(command.params) is type(params)
    assert command.input == TokenInput([1, 2, 3])
    assert (command.request_id, command.priority, command.cache_salt, command.deadline) == ("id", -3, "salt", 12.5)
    assert command.tenant == "t"


@pytest.mark.parametrize("full", [EVERYTHING, POOLING], ids=lambda full: type(full).__name__)
def test_everything_is_everything(full: SamplingParams | PoolingParams) -> None:
    """A field added later must be added above, too."""
    plain = type(full)()
    unset = [
        field.name for field in dataclasses.fields(full) if getattr(full, field.name) == getattr(plain, field.name)
    ]
    assert unset == (list(APART) if isinstance(full, SamplingParams) else [])
    for name, params in APART.items():
        assert getattr(params, name) != getattr(SamplingParams(), name)


@pytest.mark.parametrize("ids", [[], (4, 5), range(3)])
def test_token_inputs(ids: Any) -> None:
    assert added(ids, SamplingParams()).input == TokenInput(list(ids))
    assert added(TokenInput(ids, "text stays behind"), SamplingParams()).input == TokenInput(list(ids))

    types = TokenInput(ids, "text", token_type_ids=ids)
    assert added(types, PoolingParams()).input == TokenInput(list(ids), token_type_ids=list(ids))

    boxes = [[0, 1, 2, 3] for _ in ids]
    assert added(TokenInput(ids, bbox=boxes), PoolingParams()).input == TokenInput(list(ids), bbox=boxes)

    sides = {"colours": [*ids]}
    assert added(TokenInput(ids, sides=sides), SamplingParams()).input == TokenInput(list(ids), sides=sides)


def test_other_inputs() -> None:
    assert added(Seq2SeqInput([1, 2], [3]), SamplingParams()).input == Seq2SeqInput([1, 2], [3])
    assert added(Seq2SeqInput([1, 2]), SamplingParams()).input == Seq2SeqInput([1, 2])
    pixels = np.arange(24, dtype=np.float64).reshape(2, 3, 4)
    input = added(PixelInput(pixels, encoder_token_ids=(5, 6)), PoolingParams()).input
    assert isinstance(input, PixelInput)
    assert input.pixel_values.dtype == np.float32
    assert np.array_equal(input.pixel_values, pixels)
    assert (input.decoder_token_ids, input.encoder_token_ids) == (None, [5, 6])
    sound = added(AudioInput(pixels[0].T, decoder_token_ids=(7, 8)), SamplingParams()).input
    assert isinstance(sound, AudioInput)
    assert np.array_equal(sound.input_features, pixels[0].T)  # which does not lie in C order
    assert list(sound.decoder_token_ids or ()) == [7, 8]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([["a"]], "must be an array of numbers"),
        ([[1.0], [1.0, 2.0]], "must be an array of numbers"),
        (np.zeros(2**24 + 1, dtype=np.int8), f"at most {2**26} bytes as float32, got {2**26 + 4}"),
    ],
)
def test_what_is_no_signal_is_not_sent(values: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        added(PixelInput(values), PoolingParams())


@pytest.mark.parametrize("shape", [(2, 3), (-2, -2), (2**62, 4)])
def test_a_signal_whose_bytes_do_not_fit_its_shape(shape: tuple[int, ...]) -> None:
    """It is refused as it is read; only that request is."""
    message = AddRequest(request_id="a", signal=Signal("image", shape, b"\0" * 16), pooling=PoolingParams())
    command = decode_command(msgspec.msgpack.encode(message))
    assert isinstance(command, AddRequest)
    with pytest.raises(InvalidRequestError, match="16 bytes are not the float32 numbers of a signal of shape"):
        _ = command.input


@pytest.mark.parametrize("choice", [None, 0, 5])
def test_abort(choice: int | None) -> None:
    assert decode_command(encode(Abort("id", choice))) == Abort("id", choice)


@pytest.mark.parametrize(
    ("ids", "terms", "param"),
    [
        ([1, "2"], {}, "prompt"),
        ([1, 2.5], {}, "prompt"),
        ([True], {}, "prompt"),
        ("text", {}, "prompt"),
        ([1], {"priority": "high"}, "priority"),
        ([1], {"cache_salt": 5}, "cache_salt"),
        ([1], {"deadline": "soon"}, "deadline"),
        ([1], {"tenant": 7}, "tenant"),
    ],
)
def test_what_is_malformed_is_refused_by_name(ids: Any, terms: dict[str, Any], param: str) -> None:
    answer = decode_command(encode_add("id", ids, SamplingParams(), **terms))
    assert isinstance(answer, tuple)
    assert answer[0] == "id"
    assert answer[1].param == param
    assert param in str(answer[1])


def test_a_malformed_input_to_pool_is_called_as_elsewhere() -> None:
    answer = decode_command(encode_add("id", [1, "2"], PoolingParams()))
    assert isinstance(answer, tuple)
    assert (answer[0], answer[1].param) == ("id", "input")


@pytest.mark.parametrize("input", [[2**70], [np.int64(1)], object()])
def test_what_cannot_be_sent_is_refused_here(input: Any) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        encode_add("id", input, SamplingParams())
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        encode_add("id", [1], SamplingParams(stop="\ud800"))
    with pytest.raises(InvalidRequestError, match="SamplingParams or PoolingParams"):
        encode_add("id", [1], input)


def test_news() -> None:
    entry = {5: Logprob(-0.1, 1, "five"), 3: Logprob(-float("inf"), 2), 9: Logprob(-1e-300)}
    deltas = [
        RequestDelta(request_id="accepted", choices=[]),
        RequestDelta(
            request_id="full",
            choices=[
                ChoiceDelta(index=0, token_ids=[1, 2], logprobs=[entry, {}], sums=[-0.1, -0.2]),
                ChoiceDelta(index=0, token_ids=[1, 2], cumulative_logprob=-0.30000000000000004),
                ChoiceDelta(index=1, token_ids=[], finish_reason="stop", stop_reason="why", score=-1.5),
                ChoiceDelta(index=2, token_ids=[7], finish_reason="length", stop_reason=7),
            ],
            finished=True,
            prompt_logprobs=[None, entry],
            num_cached_tokens=16,
            error="what went wrong",
            scheduled_time=0.125,
            first_token_time=1e9 + 0.1,
        ),
        RequestDelta(request_id="vector", choices=[], finished=True, pooled=Pooled.of(VALUES)),
        RequestDelta(request_id="masks", choices=[], finished=True, pooled=Pooled.of(VALUES, IDS)),
        RequestDelta(request_id="beams", choices=[], beams=BeamMoves([BeamMove(1, 5, -0.5)], [BeamMove(0, 2, -1e9)])),
        RequestDelta(request_id="late", choices=[], finished=True, error="deadline"),
    ]
    failed = {"refused": Failed.of(InvalidRequestError("no", param="prompt", code="too_long"))}
    numbers = [f for f in dataclasses.fields(EngineStats) if not isinstance(f.default, tuple)]
    stats = EngineStats(**{f.name: type(f.default)(i) for i, f in enumerate(numbers)})  # type: ignore
    stats.running_adapters, stats.waiting_adapters = ("a",), ("b", "c")
    adapter = AdapterInfo(name="a", path="p", rank=4, digest=b"\0\xff", num_bytes=5, slot=1)
    sent = News(deltas, failed, stats, 12, adapters=[adapter])
    news = decode_news(encode(sent))
    assert news == sent
    assert (news.deltas[1].scheduled_time, news.deltas[1].first_token_time) == (0.125, 1e9 + 0.1)
    vector, masks = news.deltas[2].pooled, news.deltas[3].pooled
    assert vector is not None
    assert masks is not None
    assert vector.values().tobytes() == masks.values().tobytes() == VALUES.tobytes()
    assert np.array_equal(masks.token_ids(), IDS)
    assert (vector.values().shape, vector.ids) == ((2, 3), None)
    received = news.deltas[1].choices[0].logprobs
    assert received is not None
    assert list(received[0]) == [5, 3, 9]  # the chosen token first
    assert all(type(item) is Logprob for item in received[0].values())


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode({"deltas": 5})])
def test_noise_is_no_news(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_news(data)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a setting"),
        ModelLoadError("line one\nline two"),
        UnsupportedModelError("ALiBi"),
        InvalidRequestError("bad", param="top_p", code="invalid_value"),
        RequestFailedError("failed"),
        EngineDeadError("dead"),
        OctavoError("any"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors(error: OctavoError) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_framed(theirs, Failed.of(error))
        reply = receive_reply(ours)
    assert isinstance(reply, Failed)
    again = reply.error()
    assert (type(again), str(again)) == (type(error), str(error))
    assert getattr(again, "param", None) == getattr(error, "param", None)
    assert getattr(again, "code", None) == getattr(error, "code", None)


@pytest.mark.parametrize("kind", ["ZeroDivisionError", "annotations", "Exception"])
def test_a_foreign_error_is_the_engines_death(kind: str) -> None:
    error = Failed(kind, "because").error()
    assert type(error) is EngineDeadError
    assert str(error) == f"{kind}: because"


def test_the_lifeline() -> None:
    info = EngineInfo(
        model="m", model_path="p", dtype="float32", kv_cache_dtype="int8", device="cpu", max_model_len=64,
        vocab_size=10, block_size=16, num_blocks=10, full_requests=2.5, max_num_seqs=8, max_num_beams=16,
        prompts={"query": "q: "}, default_prompt="query",
        tasks=("fill_mask", "embed"), pooling_modes=("cls", "mean"), labels=("no", "yes"), activation="sigmoid",
    )  # fmt: skip
    start = Start(EngineConfig(model="m", kv_cache_memory="4GiB", hf_token="x"), "ipc:///a", "/a", 20, "json")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_framed(ours, start)
        assert receive_start(theirs) == start
        send_framed(theirs, Loading(42))
        assert receive_reply(ours) == Loading(42)
        send_framed(theirs, Ready(info, EngineStats()))
        assert receive_reply(ours) == Ready(info, EngineStats())
        theirs.sendall(b"\x00\x00\x00\x09half")
        theirs.close()
        assert receive_reply(ours) is None


class FaultyEngine:
    """Accepts what is not called "bad"; a step finishes everything."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.adapters: dict[str, AdapterInfo] = {}
        self.executor = SimpleNamespace(watched=())
        self.steps = 0

    def add_request(self, request_id: str, *arguments: Any, **terms: Any) -> None:
        if request_id == "bad":
            raise ZeroDivisionError("made by the test")
        self.running.append(request_id)

    def abort_request(self, request_id: str, choice: int | None) -> None:
        self.running.remove(request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step_deltas(self) -> list[RequestDelta]:
        self.steps += 1
        done, self.running = self.running, []
        return [RequestDelta(request_id=request_id, choices=(), finished=True) for request_id in done]

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.running), num_steps=self.steps)


class Channel:
    """A socket that holds commands of clients and keeps what is sent to them."""

    def __init__(self, *commands: bytes | tuple[bytes, bytes]) -> None:
        self.commands = [(b"client", command) if isinstance(command, bytes) else command for command in commands]
        self.sent: list[News] = []
        self.told: list[tuple[bytes, News]] = []

    def recv_multipart(self, flags: int = 0) -> tuple[bytes, bytes]:
        if not self.commands:
            raise zmq.Again
        return self.commands.pop(0)

    def send_multipart(self, parts: list[bytes]) -> None:
        self.told.append((parts[0], decode_news(parts[1])))
        self.sent.append(self.told[-1][1])


def test_the_engine_prepares_for_grammars_when_it_is_told_to() -> None:
    engine, warmed = FaultyEngine(), []
    engine.warm_grammars = lambda: warmed.append(True)  # type: ignore[attr-defined]
    channel = Channel(encode(Warm()))
    Loop(engine, channel).turn()  # type: ignore[arg-type]
    assert warmed == [True]
    assert channel.sent[0].num_commands == 1


def test_a_burst_of_commands_does_not_delay_a_step() -> None:
    engine = FaultyEngine()
    engine.running = ["stream"]
    channel = Channel(*(encode_add(f"one{number}", [1], SamplingParams()) for number in range(MOST_COMMANDS + 40)))
    loop = Loop(engine, channel)  # type: ignore[arg-type]
    loop.turn()
    assert len(channel.commands) == 40
    assert len(channel.sent[-1].deltas) == MOST_COMMANDS, "the step ran before the rest was taken"
    engine.running = ["stream"]
    loop.turn()
    assert (len(channel.commands), engine.steps) == (0, 2)


def test_an_idle_engine_ends_with_a_runner() -> None:
    """It waits for commands, and for news from the process that computes its steps."""
    engine, (ours, theirs) = FaultyEngine(), socket.socketpair()
    theirs.close()

    def check() -> None:
        raise EngineDeadError("made by the test")

    engine.executor = SimpleNamespace(watched=(ours.fileno(),), check=check)
    with ours, zmq.Context() as context, context.socket(zmq.ROUTER) as channel:
        channel.bind("inproc://engine")
        with pytest.raises(EngineDeadError, match="made by the test"):
            Loop(engine, channel).turn()  # type: ignore[arg-type]


class SlowAdapter:
    """An adapter that is being read until `ready`."""

    ready = False


def test_the_loop_goes_on_while_an_adapter_is_read() -> None:
    """The command counts as carried out at once; its answer follows the load, and tells all clients of the adapter."""
    engine, reading = FaultyEngine(), SlowAdapter()
    engine.read_adapter = lambda name, path: reading  # type: ignore[attr-defined]
    info = AdapterInfo(name="a", path="p", rank=4, digest=b"d", num_bytes=5, slot=1)
    engine.finish_adapter = lambda name, done: engine.adapters.update({name: info})  # type: ignore[attr-defined]
    load, add = encode(LoadAdapter("call", "a", "p")), encode_add("b", [1], SamplingParams())
    channel = Channel((b"x", encode(JoinEngine())), load, add)
    loop = Loop(engine, channel)  # type: ignore[arg-type]
    loop.turn()
    assert [delta.request_id for news in channel.sent for delta in news.deltas] == ["b", "b"]
    assert channel.sent[-1].num_commands == 2
    assert channel.sent[-1].adapters is None
    reading.ready, engine.running = True, ["b"]
    channel.told.clear()
    loop.turn()
    heard = {name: [delta.request_id for delta in news.deltas] for name, news in channel.told[:2]}
    assert heard == {b"x": [], b"client": ["call"]}
    assert [news.adapters for _, news in channel.told[:2]] == [[info], [info]]


def test_a_fault_while_adding_fails_that_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    good, bad, gone = (encode_add(name, [1], SamplingParams()) for name in ("good", "bad", "gone"))
    wrong = encode_add("wrong", ["x"], SamplingParams())
    channel = Channel(good, bad, wrong, gone, encode(Abort("gone")))
    Loop(FaultyEngine(), channel).turn()  # type: ignore[arg-type]
    commands, step = channel.sent
    assert [delta.request_id for delta in commands.deltas] == ["good", "gone"]
    assert isinstance(commands.failed["bad"].error(), RequestFailedError)
    assert "made by the test" in commands.failed["bad"].message
    assert isinstance(commands.failed["wrong"].error(), InvalidRequestError)
    assert commands.num_commands == step.num_commands == 5
    assert [(delta.request_id, delta.finished) for delta in step.deltas] == [("good", True)]
    assert step.stats.num_steps == 1
    assert "made by the test" in caplog.text


def test_each_client_hears_of_its_own_requests() -> None:
    first, second = encode_add("a", [1], SamplingParams()), encode_add("b", [1], SamplingParams())
    channel = Channel((b"x", encode(JoinEngine())), (b"y", encode(JoinEngine())), (b"z", encode(JoinEngine())))
    loop = Loop(FaultyEngine(), channel)  # type: ignore[arg-type]
    loop._obey()
    assert [(name, news.num_commands, news.deltas) for name, news in channel.told] == [
        (b"x", 0, []), (b"y", 0, []), (b"z", 0, []),
    ]  # fmt: skip
    # Neither an abortion of another client's request nor what comes after its dismissal counts.
    channel.told.clear()
    channel.commands += [(b"x", first), (b"y", second), (b"y", encode(Abort("a")))]
    loop.turn()
    heard = [(name, news.num_commands, [delta.request_id for delta in news.deltas]) for name, news in channel.told]
    assert heard == 2 * [(b"x", 1, ["a"]), (b"y", 2, ["b"]), (b"z", 0, [])]  # of work's beginning, and of its step
    assert {(news.stats.num_running, news.stats.num_steps) for _, news in channel.told[3:]} == {(0, 1)}


def test_the_requests_of_a_client_that_is_gone_end() -> None:
    engine = FaultyEngine()
    added = [(name, encode_add(request, [1], SamplingParams())) for name, request in ((b"x", "a"), (b"y", "b"))]
    late = encode_add("late", [1], SamplingParams())
    channel = Channel((b"z", encode(JoinEngine())), *added, (b"z", encode(Dismiss(b"x"))), (b"x", late))
    loop = Loop(engine, channel)  # type: ignore[arg-type]
    loop._obey()
    assert engine.running == ["b"]
    assert [name for name, _ in channel.told] == [b"z", b"y"]
    loop.turn()
    assert [name for name, _ in channel.told[2:]] == [b"z", b"y"]
    assert engine.running == []
