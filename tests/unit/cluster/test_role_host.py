# SPDX-License-Identifier: Apache-2.0
"""What lives inside a worker, driven by its orders without any transport."""

import os
import re
import threading

import pytest

from helpers.processes import wait_until
from helpers.roles import Batch, Counter, Request, Stubborn, ids
from podium.cluster.host import RoleHost, parameters_of
from podium.cluster.identity import WorkerId
from podium.cluster.layout import public_methods
from podium.cluster.meshes import MeshShape, RoleMesh
from podium.cluster.messages import Build, Clear, Disconnect, Import, Invoke, Settle
from podium.cluster.results import Computed
from podium.cluster.worker_context import WorkerContext
from podium.errors import ClusterError, DataError

WORKER = WorkerId("gen", 1, "node-a", "cpu", 2)
ALONE = RoleMesh(role="counter", pool="gen", shape=MeshShape(replica=2), slots=(0, 1))
FOUR = ids(range(2))


class Picky(Counter):
    """Fails in its own ways."""

    def fail_for_the_user(self):
        raise DataError("train.jsonl, line 7: this is not JSON")

    def fail_oddly(self):
        raise UnpicklableError(threading.Lock())

    def end_early(self, request):
        yield from self.generate_slowly(Request(ids=request.ids.take([0])))
        raise ValueError("the second did not come")

    def yield_a_number(self, request):
        yield 3

    def hold(self, inside, leave):
        with self.context.span("holding"):
            inside.set()
            assert leave.wait(20)

    def seen(self):
        return self.context


class UnpicklableError(DataError):
    """An error of Podium's that cannot travel."""


class OtherCopy(Counter):
    """The same role in an older copy of the code."""

    def add(self, number):
        return number


class OtherRole:
    """Nobody's implementation."""


def methods_of(kind):
    return {name: parameters_of(method) for name, method in public_methods(kind).items()}


def settled(mesh=ALONE):
    host = RoleHost(node="node-a", host="127.0.0.1", device="cpu", kind="cpu", own_process=False)
    done(host.perform(Settle(worker=WORKER, meshes=(mesh,))))
    return host


def built(kind=Counter, mesh=ALONE, arguments=()):
    host = settled(mesh)
    done(host.perform(Build(role="counter", methods=methods_of(kind)), kind, arguments))
    return host


def done(answer):
    """The value and the rows of an order that was carried out."""
    reply, rows = answer
    assert reply.failure is None, reply.failure
    return reply.value, rows


def failure(answer):
    reply, rows = answer
    assert reply.failure is not None
    assert rows is None
    return reply.failure


def invoke(method, wants="value", worker=WORKER):
    return Invoke(worker, "counter", method.__name__, wants)


def test_a_worker_reports_where_it_is_before_it_has_its_identity():
    handshake = RoleHost(node="node-a", host="10.0.0.7", device="cpu", kind="cpu", own_process=False).handshake()
    assert (handshake.node, handshake.host, handshake.device, handshake.kind) == ("node-a", "10.0.0.7", "cpu", "cpu")
    assert handshake.pid == os.getpid()


def test_a_role_is_built_with_its_arguments_and_called_by_name():
    host = built(arguments=(5,))
    assert done(host.perform(invoke(Counter.add), 3, twice=True)) == (11, None)
    assert done(host.perform(invoke(Counter.value))) == (11, None)


def test_a_role_gets_its_worker_context():
    host = built(Picky)
    context, _ = done(host.perform(invoke(Picky.seen)))
    assert (context.worker, context.role, context.device, context.devices) == (WORKER, "counter", "cpu", None)
    assert (context.rank, context.world) == (1, 2)
    with pytest.raises(ClusterError, match=r"gen\[1\]@node-a/cpu#2 .*'weights'.*workers\.connect"):
        context.transfer("weights")


def test_every_answer_names_its_worker_and_brings_the_spans_since_the_last():
    host = built()
    reply, _ = host.perform(invoke(Counter.nap), 0.0)
    assert reply.worker == WORKER
    assert reply.last
    assert [span.name for span in reply.spans] == ["counter.nap > napping", "counter.nap"]
    assert {span.worker for span in reply.spans} == {WORKER}
    again, _ = host.perform(invoke(Counter.value))
    assert [span.name for span in again.spans] == ["counter.value"]


def test_rows_are_set_apart_from_the_answer_which_tells_of_them():
    head, rows = done(built().perform(invoke(Counter.generate, "rows"), Request(ids=FOUR)))
    assert head.ids.same_as(FOUR)
    # (d, s) has 1 + (7d + 3s) mod 11 tokens.
    assert head.lengths_N.tolist() == [1, 4, 8, 11]
    assert head.stored
    assert {metric.name: metric.value for metric in head.metrics if metric.name != "token"} == {
        "tokens": 24.0,
        "longest": 11.0,
    }
    assert rows.tokens_T[rows.offsets[:-1]].tolist() == [0, 1, 100, 101]


def test_a_call_that_returns_no_rows_reports_a_length_of_0_for_each():
    host = built(Picky)
    head, rows = done(host.perform(invoke(Counter.consume, "rows"), Batch(block=Request(ids=FOUR))))
    assert rows is None
    assert (head.stored, head.lengths_N.tolist()) == (False, [0, 0, 0, 0])


def test_a_stream_hands_on_each_block_as_it_comes_and_says_when_it_ends():
    stream = built().stream(invoke(Counter.generate_slowly, "rows"), Request(ids=FOUR))
    blocks = [next(stream) for _ in range(4)]
    assert [reply.last for reply, _ in blocks] == [False] * 4
    assert [list(reply.value.ids) for reply, _ in blocks] == [[each] for each in FOUR]
    assert [rows.tokens_T[0] for _, rows in blocks] == [0, 1, 100, 101]
    ((last, rows),) = list(stream)
    assert (last.last, last.value, last.failure, rows) == (True, None, None, None)
    assert [span.name for span in last.spans] == ["counter.generate_slowly"]


def test_a_stream_that_fails_has_sent_what_was_finished_before():
    sent = list(built(Picky).stream(invoke(Picky.end_early, "rows"), Request(ids=FOUR)))
    assert [reply.last for reply, _ in sent] == [False, True]
    assert sent[1][0].failure.kind == "ValueError"
    assert sent[1][0].failure.text == "the second did not come"


def test_a_stream_of_what_are_no_rows_fails_with_the_methods_name():
    ((last, _),) = list(built(Picky).stream(invoke(Picky.yield_a_number, "rows"), Request(ids=FOUR)))
    assert last.failure.text == (
        "counter.yield_a_number was called for rows and gave int; such a method returns (or yields) Computed."
    )


def test_a_stream_that_is_left_closes_its_span():
    host = built()
    stream = host.stream(invoke(Counter.generate_slowly, "rows"), Request(ids=FOUR))
    next(stream)
    stream.close()
    assert next(host.beats(0.0)).doing == ""


def test_an_exception_of_the_role_is_part_of_the_answer_with_its_traceback():
    failed = failure(built().perform(invoke(Counter.fail_on), 1))
    assert (failed.kind, failed.text, failed.error) == ("ValueError", "rank 1 does not feel well", None)
    assert "roles.py" in failed.trace
    assert "in fail_on" in failed.trace


def test_the_worker_continues_after_a_failure():
    host = built()
    failure(host.perform(invoke(Counter.fail_on), 1))
    assert done(host.perform(invoke(Counter.add), 2)) == (2, None)


def test_an_error_of_podiums_travels_as_itself_if_it_can():
    host = built(Picky)
    failed = failure(host.perform(invoke(Picky.fail_for_the_user)))
    assert isinstance(failed.error, DataError)
    odd = failure(host.perform(invoke(Picky.fail_oddly)))
    assert (odd.kind, odd.error) == ("UnpicklableError", None)


def test_a_method_that_was_called_for_rows_and_has_none_fails_with_its_name_and_sends_nothing():
    reply, rows = built().perform(invoke(Counter.not_rows, "rows"), Request(ids=FOUR))
    assert re.match(r"counter\.not_rows .*\bint\b.*Computed", reply.failure.text)
    assert (reply.value, rows) == (None, None)


def test_a_call_for_another_worker_or_incarnation_is_refused():
    before = WorkerId("gen", 1, "node-a", "cpu", 1)
    failed = failure(built().perform(invoke(Counter.value, worker=before)))
    assert failed.kind == "ClusterError"
    assert re.search(r"gen\[1\]@node-a/cpu#1 .*gen\[1\]@node-a/cpu#2", failed.text)


def test_a_stream_for_another_worker_is_refused_too():
    other = WorkerId("gen", 0, "node-a", "cpu", 2)
    ((last, _),) = list(built().stream(invoke(Counter.generate_slowly, "rows", other), Request(ids=FOUR)))
    assert re.search(r"gen\[0\]@node-a/cpu#2 .*gen\[1\]@node-a/cpu#2", last.failure.text)


def test_a_method_whose_parameters_differ_in_the_workers_code_fails_when_the_role_is_built():
    order = Build(role="counter", methods=methods_of(Counter))
    failed = failure(settled().perform(order, OtherCopy, ()))
    assert failed.text.startswith("gen[1]@node-a/cpu#2: ")
    assert "OtherCopy.add(self, number, *, twice)" in failed.text
    assert "(self, number)" in failed.text


def test_a_method_that_the_workers_code_has_not_fails_when_the_role_is_built():
    order = Build(role="counter", methods={**methods_of(Counter), "update": ("self", "shard")})
    failed = failure(settled().perform(order, Counter, ()))
    assert failed.text.startswith("gen[1]@node-a/cpu#2: ")
    assert "Counter.update(self, shard)" in failed.text


def test_a_parameter_that_only_one_copy_takes_by_keyword_is_noticed():
    def by_keyword(self, number, *, twice=False): ...
    def by_position(self, number, twice=False): ...

    assert parameters_of(by_keyword) != parameters_of(by_position)


def test_parameters_are_recognised_by_name_and_not_by_default_or_annotation():
    def plain(self, number, *rest, **named): ...
    def annotated(self, number: int = 3, *rest: int, **named: str): ...

    assert parameters_of(plain) == parameters_of(annotated)
    assert parameters_of(plain)[1:] == ("number", "*rest", "**named")


def test_what_has_no_signature_is_compared_by_existence_only():
    assert parameters_of(dict.update) == parameters_of(dict.update)
    assert parameters_of(3) == ("...",)


def test_where_the_class_that_travels_is_an_interface_the_named_class_is_built():
    order = Build(role="counter", methods=methods_of(Counter), implementation=f"{__name__}:Picky")
    host = settled()
    done(host.perform(order, Counter, ()))
    assert isinstance(done(host.perform(invoke(Picky.seen)))[0], WorkerContext)


@pytest.mark.parametrize("place", [f"{__name__}:OtherRole", f"{__name__}:methods_of"])
def test_what_does_not_implement_the_interface_is_not_built(place):
    order = Build(role="counter", methods=methods_of(Counter), implementation=place)
    failed = failure(settled().perform(order, Counter, ()))
    assert failed.kind == "ClusterError"
    assert place in failed.text


def test_code_that_cannot_be_imported_is_an_answer():
    failed = failure(settled().perform(Import(modules=("podium.roles.butler",))))
    assert (failed.kind, failed.text) == ("ModuleNotFoundError", "No module named 'podium.roles.butler'")


def test_a_worker_that_shares_its_process_does_not_keep_torch_from_the_others():
    done(settled().perform(Import(modules=(), tokenizers_only=True)))
    import transformers

    assert transformers.utils.is_torch_available()


def test_a_constructor_that_fails_is_an_answer_too():
    order = Build(role="counter", methods=methods_of(Stubborn))
    failed = failure(settled().perform(order, Stubborn, ()))
    assert (failed.kind, failed.text) == ("RuntimeError", "no model at models/none")


def test_leaving_a_link_that_is_not_there_is_no_mistake():
    assert done(settled().perform(Disconnect(name="weights"))) == (None, None)


def test_where_and_beats_answer_while_the_work_thread_is_busy():
    host, inside, leave = built(Picky), threading.Event(), threading.Event()
    assert next(host.beats(0.0)).doing == ""
    thread = threading.Thread(target=lambda: host.perform(invoke(Picky.hold), inside, leave))
    thread.start()
    try:
        assert inside.wait(20)
        where = host.where()
        beat = next(host.beats(0.0))
    finally:
        leave.set()
        thread.join(20)
    place = next(place for place in where.threads if place.span)
    assert (place.thread, place.span) == ("work", "counter.hold > holding")
    # What leads to the role's own code is left out.
    assert place.stack[0].split()[-1] == "hold"
    assert beat.doing == "counter.hold > holding"
    assert beat.for_s >= 0.0
    wait_until(lambda: next(host.beats(0.0)).doing == "", "the end of the work", deadline_s=10)


def test_computed_rows_without_trajectories_are_still_rows():
    head, rows = done(built().perform(invoke(Counter.generate, "rows"), Request(ids=ids(range(0)))))
    assert (len(head.ids), head.stored, len(rows.tokens_T)) == (0, True, 0)
    assert isinstance(Computed(rows=rows).ids, type(FOUR))


NEXT = WorkerId("gen", 1, "node-a", "cpu", 3)


def test_after_another_controller_has_attached_calls_of_the_first_are_refused():
    host = built(arguments=(5,))
    beats = host.beats(0.0)
    next(beats)
    attached = host.attach()
    assert (attached.worker, attached.roles, attached.pid) == (NEXT, {"counter"}, os.getpid())
    assert list(beats) == []
    assert "which is another worker" in failure(host.perform(invoke(Counter.add), 1)).text
    assert done(host.perform(invoke(Counter.value, worker=NEXT))) == (5, None)


def test_roles_know_the_new_name_of_their_worker():
    host = built(Picky)
    host.attach()
    assert done(host.perform(invoke(Picky.seen, worker=NEXT)))[0].worker == NEXT


def test_a_worker_is_clear_when_calls_on_control_threads_have_ended():
    host, inside, leave = built(Picky), threading.Event(), threading.Event()
    controlling = threading.Thread(target=host.control, args=(invoke(Picky.hold), inside, leave))
    controlling.start()
    assert inside.wait(20)
    host.attach()
    assert "calls of an earlier controller run" in failure(host.perform(Clear(deadline_s=0.05))).text
    leave.set()
    assert done(host.perform(Clear(deadline_s=20.0))) == (0, None)
    controlling.join(20)


def test_a_worker_knows_the_last_call_to_all_that_it_began():
    host = built()
    done(host.perform(Invoke(WORKER, "counter", "value", "value", 7)))
    done(host.perform(invoke(Counter.value)))
    assert done(host.perform(Clear(deadline_s=1.0))) == (7, None)
