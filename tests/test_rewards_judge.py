"""Judges over HTTP, against a real server on the loopback interface that also misbehaves."""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers_judge import LONG, JudgeServer, brightness_score, pictures_of, question_of
from helpers_rewards import pictures
from torch import Tensor

from branchgrpo.reference.errors import InputError, OptionError, RewardError
from branchgrpo.reference.protocols import Prompt
from branchgrpo.rewards.endpoint import Endpoint, EndpointFailure
from branchgrpo.rewards.judge import ImageJudge, JudgeOptions, MotionJudge
from branchgrpo.rewards.missing import MissingScores
from branchgrpo.rewards.registry import RewardSpec, build_reward
from branchgrpo.rewards.retry import Retry
from branchgrpo.rewards.reward_set import RewardSet
from branchgrpo.rewards.score_parser import ScoreParser, UnreadableScore
from branchgrpo.rewards.scoring import score_leaves

PATIENT = 30.0
"""Seconds an attempt where no answer is meant to be late; a healthy one takes about 5 ms, a busy machine's may wait."""

TIMEOUT = dict.fromkeys(("slow", "drip"), 1.0)
"""Seconds an attempt under faults that are ended by it."""

FAULTS = {
    "slow": "no answer within 1 s",
    "drip": "within 1 s",
    "error": "status 500",
    "busy": "status 429",
    "garbage": "malformed JSON",
    "list": "not a JSON object",
    "half": "IncompleteRead",
    "halfjson": "malformed JSON",
    "chunked": "IncompleteRead",
    "reset": "Reset|reset|RemoteDisconnected",
    "empty": r"without choices\[0\]",
    "mute": "without text",
    "cut": "cut at max_tokens",
    "vague": "no 'Final Score'",
    "torn": r"several values of 'Final Score', \[2\.0, 4\.0\]",
    "outside": "is 9.5, outside 1 … 5",
    "nan": "no 'Final Score'",
}


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with JudgeServer() as running:
        yield running


def judge(server: JudgeServer, attempts: int = 1, timeout: float = PATIENT, **options: object) -> ImageJudge:
    waits: list[float] = []
    retry = Retry(attempts, base_s=0.1, cap_s=3.0)
    asked = JudgeOptions(retry=retry, concurrency=4, **options)  # type: ignore[arg-type]
    made = ImageJudge("unified", Endpoint(server.base_url, "tiny-judge", timeout), asked, sleep=waits.append)
    made.waits = waits  # type: ignore[attr-defined]
    return made


def expected(images: Tensor) -> list[float]:
    levels = (images * 255).round().permute(0, 2, 3, 1).numpy()
    return [brightness_score([picture]) for picture in levels]


def test_every_score_belongs_to_its_image_and_prompt(server: JudgeServer) -> None:
    images = torch.stack([torch.full((3, 6, 5), i / 10) for i in range(11)])
    owners = [Prompt(i, f"number {i} " + "{frames}") for i in range(11)]
    found = judge(server)(images, owners)
    assert found.dtype == torch.float64
    assert found.tolist() == expected(images)
    assert len(set(found.tolist())) == 11
    for payload in server.requests:
        number = round(float(pictures_of(payload)[0].mean()) / 25.5)
        assert f'caption: "number {number} {{frames}}"' in question_of(payload)
        assert payload["model"] == "tiny-judge"
        assert payload["temperature"] == 0.0
    assert set(server.paths) == {"/v1/chat/completions"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_the_step_by_name_and_keeps_the_other_scores(server: JudgeServer, fault: str) -> None:
    images = pictures(3)
    owners = [Prompt(4, "fine"), Prompt(8, f"a cat fault:{fault}*99!"), Prompt(9, "fine too")]
    start = time.monotonic()
    with pytest.raises(MissingScores, match=rf"item 1, prompt 8 \('a cat.*{FAULTS[fault]}") as caught:
        judge(server, timeout=TIMEOUT.get(fault, PATIENT))(images, owners)
    assert time.monotonic() - start < LONG
    assert list(caught.value.reasons) == [1]
    assert caught.value.scores[[0, 2]].tolist() == [expected(images)[0], expected(images)[2]]
    assert caught.value.scores[1].isnan()
    assert len(server.requests) == 3


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_is_retried(server: JudgeServer, fault: str) -> None:
    images = pictures(2)
    reward = judge(server, attempts=3, timeout=TIMEOUT.get(fault, PATIENT))
    found = reward(images, [Prompt(0, "fine"), Prompt(1, f"a dog fault:{fault}*2!")])
    assert found.tolist() == expected(images)
    assert len(server.requests) == 4
    first, second = reward.waits
    if fault == "busy":  # the server asked for 7 s, the cap is 3
        assert (first, second) == (3.0, 3.0)
    else:
        assert 0.05 <= first <= 0.1 < second <= 0.2


def test_what_cannot_succeed_is_not_retried(server: JudgeServer) -> None:
    with pytest.raises(MissingScores, match=r"status 404.*no such model.*attempt 1 of 5"):
        judge(server, attempts=5)(pictures(1), [Prompt(1, "fault:denied*99!")])
    assert len(server.requests) == 1


def test_an_absent_server_is_named() -> None:
    with JudgeServer() as gone:
        url = gone.base_url
    with pytest.raises(MissingScores, match=r"ConnectionRefusedError.*attempt 2 of 2"):
        ImageJudge("j", Endpoint(url, "m", 1.0), JudgeOptions(retry=Retry(2, 0.0, 0.0)))(pictures(1), [Prompt(0, "a")])


def test_the_log_of_a_step_holds_every_score_but_the_missing_one(server: JudgeServer) -> None:
    samples = pictures(6).view(2, 3, 3, 30, 22)
    owners = [Prompt(0, "a cat"), Prompt(1, "a dog fault:reset*1!")]
    logged = []
    with pytest.raises(RewardError, match=r"model unified, leaf \d, prompt 1 \('a dog.*RemoteDisconn|[Rr]eset"):
        score_leaves(samples, owners, RewardSet.of(judge(server)), log=logged.extend)
    assert [line.value is None for line in logged[:3]] == [False] * 3
    assert sum(line.value is None for line in logged[3:]) == 1


@pytest.mark.parametrize("limit", [1, 3])
def test_requests_in_flight_are_bounded(server: JudgeServer, limit: int) -> None:
    server.hold_s = 0.1
    options = JudgeOptions(concurrency=limit)
    made = ImageJudge("unified", Endpoint(server.base_url, "m", PATIENT), options)
    made(pictures(9), [Prompt(i, f"{i}") for i in range(9)])
    assert server.most_running == limit


def test_many_faults_at_once_lose_nothing(server: JudgeServer) -> None:
    names = [f for f in FAULTS if f not in TIMEOUT]
    images = pictures(2 * len(names))
    owners = [Prompt(i, f"{i} fault:{names[i // 2]}*{i % 2}!") for i in range(len(images))]
    assert judge(server, attempts=2)(images, owners).tolist() == expected(images)
    assert len(server.requests) == 3 * len(names)


def test_motion_judge_shows_frames_in_order(server: JudgeServer) -> None:
    video = torch.linspace(0, 1, 16).view(1, 16, 1, 1, 1).expand(2, 16, 3, 4, 4).clone()
    video[1] = 0.5
    reward = MotionJudge("motion", Endpoint(server.base_url, "m", 2.0), frames=4)
    found = reward(video, [Prompt(0, "rising"), Prompt(1, "still")])
    by_prompt = {("rising" if "rising" in question_of(p) else "still"): pictures_of(p) for p in server.requests}
    assert [round(float(p.mean())) for p in by_prompt["rising"]] == [0, 85, 170, 255]
    assert len(by_prompt["still"]) == 4
    assert all("4 frames, in order" in question_of(p) for p in server.requests)
    assert found.tolist() == [brightness_score(by_prompt["rising"]), brightness_score(by_prompt["still"])]
    assert "4 frames" in reward.version
    with pytest.raises(InputError, match="frames"):
        reward(pictures(1), [Prompt(0, "a")])
    with pytest.raises(OptionError, match=r"judge\.frames"):
        MotionJudge("motion", Endpoint(server.base_url, "m"), frames=1)


def test_key_is_sent_and_never_shown(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    options = {"base_url": server.base_url, "model": "m", "api_key_env": "JUDGE_KEY", "attempts": 1}
    reward = build_reward(RewardSpec("judge", options=options))
    reward(pictures(1), [Prompt(0, "a")])
    assert server.headers_seen[0]["Authorization"] == "Bearer sesame"
    assert "sesame" not in repr(reward.endpoint) + reward.version  # type: ignore[attr-defined]
    with pytest.raises(OptionError, match="api_key_env"):
        build_reward(RewardSpec("judge", options=options | {"api_key_env": "NO_SUCH_VARIABLE"}))


def test_template_from_a_file_and_its_version(server: JudgeServer, tmp_path: Path) -> None:
    (tmp_path / "question.txt").write_text("Rate {prompt}. Overall: X")
    options = {"base_url": server.base_url, "model": "m", "attempts": 1}
    plain = build_reward(RewardSpec("judge", options=options))
    own = build_reward(RewardSpec("judge", options=options | {"template_file": str(tmp_path / "question.txt")}))
    own(pictures(1), [Prompt(0, "{prompt} in braces")])
    assert question_of(server.requests[0]) == "Rate {prompt} in braces. Overall: X"
    assert plain.version != own.version
    assert plain.version == build_reward(RewardSpec("judge", options=options)).version


def test_an_attempt_ends_even_if_bytes_keep_coming(server: JudgeServer) -> None:
    start = time.monotonic()
    content = [{"type": "text", "text": "fault:drip*9!"}]
    with pytest.raises(EndpointFailure, match=r"within 0\.2 s"):
        Endpoint(server.base_url, "m", 0.2).post("/chat/completions", {"messages": [{"content": content}]})
    assert time.monotonic() - start < LONG
    assert threading.active_count() < 50


def test_waits_grow_are_capped_and_depend_on_the_generator_only() -> None:
    retry = Retry(10, base_s=0.5, cap_s=4.0)
    waits = [retry.wait(k, None, random.Random(3)) for k in range(1, 8)]
    u = random.Random(3).uniform(0.5, 1.0)
    assert waits == [u * bound for bound in (0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0)]
    assert retry.wait(1, 2.5, random.Random(0)) == 2.5
    assert retry.wait(1, 99.0, random.Random(0)) == 4.0
    assert {retry.wait(3, None, random.Random(s)) for s in range(50)} <= {
        w for s in range(50) for w in [2.0 * random.Random(s).uniform(0.5, 1.0)]
    }


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Final Score: 4", 4.0),
        ("…\n**Final Score:** 3.75.", 3.75),
        ("final_score = 2.5", 2.5),
        ('{"final score": 1.25, "reason": "dull"}', 1.25),
        ("Final Score (1-5): 4.0", 4.0),
        ("Final Score: 4 / 5", 4.0),
        ("FINAL   SCORE:\n\n 5", 5.0),
        ("Final Score: 3\nSo, Final Score: 3.0", 3.0),
        ("Alignment Score: 2\nFinal Score: 4,", 4.0),
    ],
)
def test_scores_are_read(answer: str, score: float) -> None:
    assert ScoreParser()(answer) == score


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "4",
        "Score: 4",
        "Final Score: four",
        "Final Score: 45%",
        "Final Score: 4%",
        "Final Score: 4/10",
        "Final Score: 4.5.1",
        "Final Score: 4,5",
        "Final Score: 4e0",
        "Final Score: 4x",
        "Final Score: 0.5",
        "Final Score: -3",
        "Final Score: 5.01",
        "Final Score: 2 … Final Score: 3",
        "Final Score 4",
    ],
)
def test_other_answers_are_not_guessed_at(answer: str) -> None:
    with pytest.raises(UnreadableScore):
        ScoreParser()(answer)


def test_options_are_checked() -> None:
    for build, named in (
        (lambda: Endpoint("ftp://host/v1", "m"), "base_url"),
        (lambda: Endpoint("http://user:pw@host/v1", "m"), "base_url"),
        (lambda: Endpoint("http://host/v1", ""), "endpoint.model"),
        (lambda: Endpoint("http://host/v1", "m", 0.0), "timeout_s"),
        (lambda: Retry(0), "attempts"),
        (lambda: Retry(1, 2.0, 1.0), "base_s"),
        (lambda: ScoreParser(" "), "label"),
        (lambda: ScoreParser("Score", 5.0, 1.0), "low, high"),
        (lambda: JudgeOptions(template="rate it"), "template"),
        (lambda: JudgeOptions(concurrency=0), "concurrency"),
        (lambda: JudgeOptions(max_tokens=0), "max_tokens"),
        (lambda: JudgeOptions(temperature=-1.0), "temperature"),
    ):
        with pytest.raises(OptionError, match=named):
            build()
