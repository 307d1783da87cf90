"""The guards of the queue consumers."""

from __future__ import annotations

from retrysafe.consumers import consumer, engine, handler
from retrysafe.consumers.amqp import RabbitQueue
from retrysafe.consumers.deadlines import Deadlines
from retrysafe.consumers.handler import Handler
from retrysafe.consumers.judge import Judge
from retrysafe.consumers.kafka import KafkaTopic, Partition
from retrysafe.consumers.loop import ConsumerLoop
from retrysafe.consumers.nats import JetStream
from retrysafe.consumers.sqs import SqsQueue
from tests.consumers import test_kafka as kafka
from tests.guards import test_consumer_properties as properties
from tests.guards.guard import Guard
from tests.guards.mutation import InCode

_NOT_SAFE = ("unsettled.append(message)\n                continue", "unsettled.append(message)")

CONSUMER_GUARDS: tuple[Guard, ...] = (
    Guard(
        "a message is acked only after its outcome",
        "a message whose handler failed is lost",
        (
            InCode(
                Judge.handle,
                "return self._verdict(message, error, run, tries)",
                "return Verdict(Action.ACK, str(error))",
            ),
        ),
        properties.test_a_message_is_acked_only_when_its_handler_has_ended_well,
    ),
    Guard(
        "what the handler itself raises never acks",
        "a handler that meets another key's outcome loses its own message",
        (InCode(Judge._own_rule, "if rule.action is Action.ACK:", "if False:"),),
        properties.test_what_a_handler_raises_never_acks_its_message,
    ),
    Guard(
        "only a message's own key in flight drops it",
        "with `in_flight=DROP`, a handler that meets another key in flight loses its message",
        (
            InCode(
                Judge._verdict,
                "isinstance(error, OperationInFlight) and not is_own",
                "isinstance(error, OperationInFlight)",
            ),
        ),
        properties.test_what_a_handler_met_in_flight_never_drops_its_own_message,
    ),
    Guard(
        "an outage never dead-letters",
        "good messages are given up because something else was away",
        (
            InCode(
                Judge._verdict,
                "if action is Action.RETRY and rule.outage is Outage.NONE:",
                "if action is Action.RETRY:",
            ),
        ),
        properties.test_an_outage_never_counts_against_a_message,
    ),
    Guard(
        "the payload of a message counts",
        "another message under the same id is acked and never handled",
        (InCode(engine.make_call, "fingerprints(_MESSAGE, body=body)", "fingerprints(_MESSAGE)"),),
        properties.test_another_payload_under_the_same_id_is_not_taken_for_the_first,
    ),
    Guard(
        "a publisher cannot choose a key that is made here",
        "whoever may publish takes the key of another message in advance, and that one is refused",
        (
            InCode(
                handler._own_key,
                "if text.startswith(_MADE_HERE) or looks_derived(text):",
                "if False:",
            ),
        ),
        properties.test_a_publisher_cannot_take_the_key_of_another_message,
    ),
    Guard(
        "null is no natural key",
        "all messages without a value have one key, and only the first is handled",
        (InCode(Handler._made, "if empty:", "if False:"),),
        properties.test_null_is_nobodys_key,
    ),
    Guard(
        "queue and group are quoted in the caller",
        "two consumers share their keys, and one of them handles nothing",
        (InCode(handler.consumer_name, 'quote(part, safe=":.-_~@")', "part"),),
        properties.test_queue_and_group_are_told_apart,
    ),
    Guard(
        "a renamed consumer claims under all of its names",
        "what was handled under the old name is handled again",
        (InCode(engine.make_call, "in enumerate(keys))", "in enumerate(keys[:1]))"),),
        properties.test_a_renamed_consumer_does_not_run_its_messages_again,
    ),
    Guard(
        "the active window covers what the broker may deliver again",
        "a message that comes after its key is forgotten is handled again",
        (
            InCode(
                consumer.checked_policy,
                "if needed is not None and own.active_window < needed:",
                "if False:",
            ),
        ),
        properties.test_a_window_shorter_than_what_the_broker_may_deliver_again_is_refused,
    ),
    Guard(
        "the identity of JetStream's messages has the instant they were stored",
        "the first messages of a stream that is made anew are taken for old ones, and lost",
        (
            InCode(
                JetStream._message,
                'f"{metadata.sequence.stream}@{metadata.timestamp.isoformat()}"',
                "str(metadata.sequence.stream)",
            ),
        ),
        properties.test_a_stream_that_is_made_anew_brings_new_messages,
    ),
    Guard(
        "the identity of Kafka's messages has their instant",
        "the first messages of a topic that is made anew are taken for old ones, and lost",
        (InCode(KafkaTopic._message, "@{found.timestamp()[1]}", ""),),
        properties.test_a_topic_that_is_made_anew_brings_new_messages,
    ),
    Guard(
        "deadlines are prolonged in the buffer",
        "what waits for a place runs out of its visibility, and is delivered to others as well",
        (
            InCode(
                Deadlines.due,
                "if deadline.renew_monotonic <= now",
                "if deadline.stops_renewing is not None and deadline.renew_monotonic <= now",
            ),
        ),
        properties.test_what_waits_in_the_buffer_has_its_deadline_prolonged,
    ),
    Guard(
        "what was lost in the buffer does not begin",
        "a consumer that stood still begins what others have by now",
        (
            InCode(
                ConsumerLoop._run,
                "self._forget_lost(message)\n        return",
                "pass",
            ),
        ),
        properties.test_what_was_lost_in_the_buffer_does_not_begin,
    ),
    Guard(
        "what was lost while it ran is not settled",
        "a verdict is given on a delivery that is somebody else's by now",
        (
            InCode(
                ConsumerLoop._run,
                "        self._forget_lost(message)\n    else:",
                "        self._conclude(message, verdict, tries)\n    else:",
            ),
        ),
        properties.test_what_was_lost_while_it_ran_is_not_settled,
    ),
    Guard(
        "no message is taken while the store is away",
        "the broker counts deliveries of an outage, and dead-letters good messages",
        (InCode(ConsumerLoop._room, "if self._outages:", "if False:"),),
        properties.test_while_the_store_is_away_no_message_is_taken,
    ),
    Guard(
        "a lane has one message at a time",
        "messages of one key or FIFO group are handled out of order",
        (
            InCode(
                ConsumerLoop._start_waiting,
                "lane in self._busy_lanes or lane in passed_lanes",
                "lane in passed_lanes",
            ),
        ),
        properties.test_messages_of_a_lane_do_not_run_side_by_side,
    ),
    Guard(
        "what waits behind a failed message goes back with it",
        "a later message of a FIFO group overtakes the one that failed",
        (
            InCode(
                ConsumerLoop._give_back_lane,
                "if message.lane is None or not self._broker.gives_back:",
                "if True:",
            ),
        ),
        properties.test_nothing_overtakes_a_message_of_its_lane_that_comes_back,
    ),
    Guard(
        "offsets only up to the last contiguous settled message",
        "a later success commits past a message that runs; after a crash that one is lost",
        (
            InCode(
                Partition.settle,
                "while self._received and self._received[0] in self._done:",
                "while self._received and self._done:",
            ),
        ),
        properties.test_a_later_success_does_not_commit_past_a_message_that_runs,
    ),
    Guard(
        "what is given back stays in the way of all behind it",
        "a message that nobody handled is committed past, and lost",
        (InCode(Partition.settle, "if is_done:", "if True:"),),
        properties.test_what_is_given_back_is_not_committed_past,
    ),
    Guard(
        "lost partitions fence their work",
        "a handler does not see that another consumer has its message",
        (InCode(KafkaTopic._lost, "each.is_lost = True", "pass"),),
        properties.test_lost_partitions_fence_what_runs,
    ),
    Guard(
        "nothing is committed for a lost partition",
        "offsets of an old assignment move those of the new owner",
        (
            InCode(
                KafkaTopic._taken_away,
                "self._partitions.pop(each.partition, None)",
                "self._partitions.get(each.partition)",
            ),
        ),
        properties.test_nothing_is_committed_for_partitions_that_are_lost,
    ),
    Guard(
        "a rebalance drains before it fences",
        "finished work is not committed, and delivered to the next owner",
        (
            InCode(
                KafkaTopic._revoked,
                "ends = time.monotonic() + self._drain_seconds",
                "ends = time.monotonic()",
            ),
        ),
        properties.test_a_rebalance_lets_what_runs_end_and_commits_it,
    ),
    Guard(
        "what was fetched for an assignment goes with it",
        "a message of the old assignment moves the offsets of the new one past others",
        (
            InCode(
                KafkaTopic._taken_away,
                "[each for each in self._stash if each.partition() not in numbers]",
                "self._stash",
            ),
        ),
        properties.test_what_was_fetched_for_an_assignment_goes_with_it,
    ),
    Guard(
        "a keep-alive resumes what it paused, wherever that is by now",
        "a partition that leaves during a keep-alive and comes back is never read again",
        (
            InCode(
                KafkaTopic._keep_alive,
                "for each in paused if",
                "for each in self._consumer.assignment() if",
            ),
        ),
        kafka.test_what_a_keep_alive_paused_is_resumed_also_when_it_was_taken_away_meanwhile,
    ),
    Guard(
        "SQS: a dead letter is safe before its message is deleted",
        "a message that nobody can handle is lost, with its reason",
        (InCode(SqsQueue.settle, *_NOT_SAFE),),
        properties.test_sqs_deletes_nothing_whose_dead_letter_is_not_safe,
    ),
    Guard(
        "JetStream: a dead letter is safe before its message ends",
        "the same",
        (InCode(JetStream.settle, *_NOT_SAFE),),
        properties.test_jetstream_ends_nothing_whose_dead_letter_is_not_safe,
    ),
    Guard(
        "Kafka: a dead letter is safe before its offset is committed",
        "the same",
        (InCode(KafkaTopic.settle, "if message not in unsettled:", "if True:"),),
        properties.test_kafka_commits_nothing_whose_dead_letter_is_not_safe,
    ),
    Guard(
        "RabbitMQ: a copy is confirmed before its message is acked",
        "a dead letter, or a message that waits for its retry, is lost",
        (
            InCode(
                RabbitQueue._carry_out,
                "await self._move(message, verdict)",
                "self._begin(self._move(message, verdict))",
            ),
        ),
        properties.test_rabbitmq_acks_nothing_whose_dead_letter_is_not_safe,
    ),
    Guard(
        "RabbitMQ: a message is settled on the channel that brought it",
        "delivery tags start again at 1, and an ack drops another message",
        (InCode(RabbitQueue._settle, "if message.receipt[1].is_closed:", "if False:"),),
        properties.test_what_came_over_a_closed_channel_is_not_acked_on_another,
    ),
)
