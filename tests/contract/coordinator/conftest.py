"""Small real servers that play the parts of learner, rollout server and environment server for the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
from small_servers import BUDGETS, FakeEnvironment, FakeLearner, FakeRollout, FakeService
from tensorboard.summary.writer import event_file_writer

from rollwire.coordinator.run import ResumeOrder, RunSummary, run_training
from rollwire.coordinator.run_dir import RunDir, create_run_dir
from rollwire.coordinator.status import RunStatus
from rollwire.serving.config import RunConfig, load_config
from rollwire.serving.server import Binding, serving

# Event files are read in the order of their names, which end in a count of this process: 10 would come before 9 where
# a run is started and resumed within one second.
event_file_writer._global_uid = event_file_writer.AtomicCounter(1_000_000)


@dataclass
class Notes:
    """An observer that writes down what it is told."""

    steps: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    validations: list[tuple[int, str, dict[str, float]]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    at_step: Callable[[int], None] = lambda step: None

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append((step, dict(metrics)))
        self.at_step(step)

    def on_validation(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        self.validations.append((step, kind, dict(metrics)))

    def on_notice(self, text: str) -> None:
        self.notices.append(text)


class Host:
    """Serves one fake; may be stopped and started again at the same port."""

    def __init__(self, service: FakeService) -> None:
        self.service = service
        self.address = ""
        self._stack: AsyncExitStack | None = None

    async def start(self) -> None:
        port = int(self.address.rpartition(":")[2] or 0)
        self._stack = AsyncExitStack()
        running = await self._stack.enter_async_context(serving(self.service, Binding(port=port), grace_s=0))  # type: ignore[arg-type]
        self.address = running.address

    async def stop(self) -> None:
        if self._stack is not None:
            stack, self._stack = self._stack, None
            await stack.aclose()


class World:
    """All servers of a run, and the run."""

    def __init__(self, directory: Path, rollouts: int) -> None:
        self.directory = directory
        self.environment = FakeEnvironment()
        self.learner = FakeLearner()
        self.rollouts = [FakeRollout() for _ in range(rollouts)]
        self.hosts = {service: Host(service) for service in (self.environment, self.learner, *self.rollouts)}
        self.notes = Notes()
        self.run_dir: RunDir | None = None
        self.status: RunStatus | None = None
        self.budgets = BUDGETS

    @property
    def rollout(self) -> FakeRollout:
        return self.rollouts[0]

    async def start(self) -> None:
        for host in self.hosts.values():
            await host.start()

    async def stop(self) -> None:
        for host in self.hosts.values():
            await host.stop()

    async def run(self, *overrides: str) -> RunSummary:
        """Runs three steps of two groups of two episodes unless overridden."""
        config = self._config(*overrides)
        self.run_dir = create_run_dir(config, datetime.now(UTC))
        return await self._drive(config, None)

    async def resume(self, *overrides: str, exact: bool = True) -> RunSummary:
        """Goes on with the run, under the overrides that it was started with."""
        assert self.run_dir is not None
        self.notes = Notes()
        return await self._drive(self._config(*overrides), ResumeOrder(exact))

    async def _drive(self, config: RunConfig, order: ResumeOrder | None) -> RunSummary:
        assert self.run_dir is not None
        self.status = RunStatus(run_name=config.run.name, max_steps=config.run.max_steps, observer=self.notes)
        run = run_training(config, self.run_dir, self.status, resume=order, budgets=self.budgets)
        return await asyncio.wait_for(run, 90)

    def _config(self, *overrides: str) -> RunConfig:
        addresses = {
            "environment": [self.hosts[self.environment].address],
            "rollout": [self.hosts[service].address for service in self.rollouts],
            "learner": [self.hosts[self.learner].address],
        }
        return load_config(
            None,
            [
                f"run.output_dir={self.directory}",
                "run.max_steps=3",
                "batch.groups_per_step=2",
                "batch.episodes_per_group=2",
                "validation.episodes=3",
                "validation.every_steps=2",
                "tracking.text_samples_every_steps=0",
                "timeouts.ready_s=5",
                "timeouts.group_s=20",
                "algorithm.advantage=dr_grpo",
                "algorithm.filter_zero_variance=false",
                *(f"services.{kind}=[{','.join(targets)}]" for kind, targets in addresses.items()),
                *overrides,
            ],
        )


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path, rollouts=1)
    await world.start()
    yield world
    await world.stop()


@pytest.fixture
async def many_rollouts(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path, rollouts=11)
    await world.start()
    yield world
    await world.stop()


@pytest.fixture
async def two_rollouts(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path, rollouts=2)
    await world.start()
    yield world
    await world.stop()
