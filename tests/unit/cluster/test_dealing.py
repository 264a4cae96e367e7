"""Which engine gets which problem, by the lengths of earlier answers."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.cluster.dealing import Room, deal


def siblings(**counts: int) -> list[tuple[str, str]]:
    return [(f"{problem}{i}", problem) for problem, count in counts.items() for i in range(count)]


def naive_deal(waiting, rooms, forecasts, homes):
    """One look at all engines for each part of a problem."""
    known = sorted(forecasts.values())
    usual = (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2 if known else 1.0
    places, tokens = {n: r.places for n, r in rooms.items()}, {n: r.tokens for n, r in rooms.items()}
    out = {}
    for problem in sorted(dict.fromkeys(p for _, p in waiting), key=lambda p: -forecasts.get(p, usual)):
        home = homes.get(problem)
        left = [request for request, own in waiting if own == problem]
        while left:
            free = [name for name in rooms if places[name]]
            if home in rooms and not places[home]:
                free = [name for name in free if not tokens[name]]
            elif home in rooms:
                free = [home]
            free = [name for name in free if places[name] >= len(left)] if home not in rooms else free
            if not free and home not in rooms:
                free = [name for name in rooms if places[name]]
            if not free:
                break
            home = min(free, key=lambda name: tokens[name])
            request = left.pop(0)
            out[request] = home
            places[home] -= 1
            tokens[home] += forecasts.get(problem, usual)
    return out


names = st.sampled_from("vwxyz")


@given(
    counts=st.dictionaries(names, st.integers(1, 5)),
    rooms=st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0.0, 3.0, 40.0])), max_size=5),
    forecasts=st.dictionaries(names, st.integers(1, 60).map(float)),
    homes=st.dictionaries(names, st.sampled_from(["e0", "e1", "gone"])),
)
def test_it_deals_as_a_look_at_all_engines_would(counts, rooms, forecasts, homes) -> None:
    waiting, given_rooms = siblings(**counts), {f"e{i}": Room(*room) for i, room in enumerate(rooms)}
    assert deal(waiting, given_rooms, forecasts, homes) == naive_deal(waiting, given_rooms, forecasts, homes)
