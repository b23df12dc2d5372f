"""Passwords over the network: no user can lock out others or keep the node busy."""

import asyncio
import os
import statistics
import time

import bcrypt
import pytest

from hangwatch.web import passwords
from hangwatch.web.passwords import Answer, Passwords

CHEAP, DEAR = 4, 10


def hashed(password: bytes, cost: int = CHEAP) -> str:
    return bcrypt.hashpw(password, bcrypt.gensalt(cost)).decode()


def check_password(passwords: Passwords, user: str, password: bytes, address: str = "10.0.0.1") -> Answer:
    return asyncio.run(passwords.check(user, password, address))


def cpu_seconds() -> float:
    return time.process_time()


def test_only_the_exact_user_and_password_are_accepted() -> None:
    known = Passwords({"alice": hashed(b"secret"), "bob": hashed("pässword".encode())})
    assert check_password(known, "alice", b"secret") == "right"
    assert check_password(known, "alice", b"secret") == "right"
    assert check_password(known, "bob", "pässword".encode()) == "right"
    for user, password in (("alice", b""), ("alice", b"secret "), ("bob", b"secret"), ("", b"secret"), ("eve", b"")):
        assert check_password(known, user, password) == "wrong"
        assert check_password(known, user, password) == "wrong"
    assert check_password(known, "alic", b"e:secret") == "wrong"
    assert check_password(known, "alice", b"sec\0ret") == "wrong"


def test_of_a_long_password_72_bytes_count_as_for_exporters() -> None:
    known = Passwords({"alice": hashed(b"x" * 72)})
    assert check_password(known, "alice", b"x" * 200) == "right"
    assert check_password(known, "alice", b"x" * 71) == "wrong"


def test_a_pair_that_is_known_costs_no_hash() -> None:
    known = Passwords({"alice": hashed(b"secret", DEAR)})
    began = cpu_seconds()
    assert check_password(known, "alice", b"secret") == "right"
    one_hash = cpu_seconds() - began

    async def many() -> None:
        for _ in range(200):
            assert await known.check("alice", b"secret", "10.0.0.1") == "right"
            assert await known.check("alice", b"old", "10.0.0.1") == "wrong"

    assert check_password(known, "alice", b"old") == "wrong"
    began = cpu_seconds()
    asyncio.run(many())
    assert cpu_seconds() - began < 20 * one_hash  # 400 hashes without the limit


def test_an_unknown_user_costs_as_much_as_a_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passwords, "SHARE_OF_A_CORE", 1.0)
    known = Passwords({"alice": hashed(b"secret", DEAR), "bob": hashed(b"secret", CHEAP)})
    took: dict[str, list[float]] = {"alice": [], "eve": []}
    for number in range(5):
        for user, times in took.items():
            began = cpu_seconds()
            assert check_password(known, user, b"guess %d" % number) == "wrong"
            times.append(cpu_seconds() - began)
    alice, eve = (statistics.median(times) for times in took.values())
    assert 0.5 < eve / alice < 2.0, took


def test_flood_of_wrong_passwords_costs_half_a_core_and_locks_no_user_out() -> None:
    # An attacker sends wrong passwords for alice at full speed. Meanwhile alice sends the right one from another
    # address.
    known = Passwords({"alice": hashed(b"secret", DEAR)})
    answers: list[Answer] = []

    async def attack() -> None:
        while True:
            answers.append(await known.check("alice", os.urandom(8), "10.6.6.6"))
            await asyncio.sleep(0.01)

    async def attacked() -> tuple[float, float]:
        crowd = [asyncio.create_task(attack()) for _ in range(50)]
        began, wall = cpu_seconds(), time.monotonic()
        await asyncio.sleep(0)
        assert await known.check("alice", b"secret", "10.0.0.1") == "right"
        while len(answers) < 1000:
            await asyncio.sleep(0.05)
        assert await known.check("alice", b"secret", "10.0.0.1") == "right"
        spent = cpu_seconds() - began, time.monotonic() - wall
        for one in crowd:
            one.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        return spent

    cpu, wall = asyncio.run(attacked())
    tried = sum(one == "wrong" for one in answers)
    print(f"{len(answers)} asked, {tried} hashed, {cpu:.2f} s of CPU in {wall:.1f} s")
    assert answers.count("busy") > 10 * tried
    assert cpu < 0.5 * wall


@pytest.mark.parametrize(
    ("addresses", "hashed_once"),
    [
        ([f"10.0.0.{number}" for number in range(100)], passwords.MOST_WAITING),
        ([*(f"2001:db8::{number}" for number in range(5)), "::ffff:10.0.0.1", "10.0.0.1"], 2),
        (["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.2"], 1),
    ],
    ids=["the queue is short", "a network of IPv6 is one address", "the addresses of this node are one place"],
)
def test_places_that_ask_at_the_same_time_are_hashed_once_each(addresses: list[str], hashed_once: int) -> None:
    known = Passwords({"alice": hashed(b"secret", 6)})

    async def crowd() -> list[Answer]:
        return list(await asyncio.gather(*(known.check("alice", os.urandom(8), address) for address in addresses)))

    answers = asyncio.run(crowd())
    assert answers.count("wrong") == hashed_once
    assert answers.count("busy") == len(addresses) - hashed_once


def test_the_same_pair_at_the_same_time_is_hashed_once() -> None:
    known = Passwords({"alice": hashed(b"secret", DEAR)})

    async def both() -> list[Answer]:
        return list(await asyncio.gather(*(known.check("alice", b"secret", "10.0.0.1") for _ in range(50))))

    began = cpu_seconds()
    assert set(asyncio.run(both())) == {"right"}
    several = cpu_seconds() - began
    began = cpu_seconds()
    bcrypt.checkpw(b"secret", hashed(b"secret", DEAR).encode())
    assert several < 10 * (cpu_seconds() - began)


def test_what_is_kept_of_wrong_ones_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passwords, "WRONG_KEPT", 3)
    known = Passwords({"alice": hashed(b"secret")})
    for number in range(10):
        assert check_password(known, "alice", b"%d" % number) == "wrong"
    assert len(known._wrong) == 3


def test_known_password_stays_known_after_a_change_of_users() -> None:
    alice, bob = hashed(b"secret", DEAR), hashed(b"old", DEAR)
    before = Passwords({"alice": alice, "bob": bob})
    assert check_password(before, "alice", b"secret") == "right"
    after = Passwords({"alice": alice, "bob": hashed(b"new", CHEAP), "eve": hashed(b"eve")}, before)
    began = cpu_seconds()
    assert check_password(after, "alice", b"secret") == "right"
    known = cpu_seconds() - began
    began = cpu_seconds()
    assert check_password(after, "bob", b"old") == "wrong"
    assert check_password(Passwords({"alice": alice}), "alice", b"secret") == "right"
    assert known * 10 < cpu_seconds() - began, "no hash"


def test_password_check_with_a_long_queue_is_busy() -> None:
    known = Passwords({"alice": hashed(b"secret")})
    known._rested_at = time.monotonic() + passwords.LONGEST_WAIT_SECONDS + 60
    assert check_password(known, "alice", b"secret") == "busy"
