//! An agent that waits for another one of its node on the same host.

use super::*;

impl Sim {
    fn reject_next(&mut self) {
        let arrival = self.arrival();
        self.reject(&arrival, CloseCode::NameInUse);
    }
}

#[test]
fn standby_is_ready_and_dials_at_once_when_it_has_the_lock() {
    let mut sim = Sim::start(AUTO);
    sim.handle(Event::Lock(LockState::Standby(Some(7))));
    sim.reject_next();
    assert!(sim.plan.is_ready());
    let reason = sim.missing_reason().unwrap();
    assert!(reason.starts_with("standby: another agent"), "{reason}");
    sim.lap();
    sim.handle(Event::Lock(LockState::Held(sim.now)));
    for _ in 0..3 {
        // The server has not read yet that the other agent withdrew.
        sim.reject_next();
        assert!(sim.plan.is_ready());
    }
    sim.session(Quic);
    sim.expect_lap(..1.0);
    assert_eq!(sim.missing_reason(), None);
}

#[test]
fn standby_that_finds_no_server_is_not_ready() {
    let mut sim = Sim::start(AUTO);
    sim.handle(Event::Lock(LockState::Standby(None)));
    sim.reject_next();
    sim.set_paths(Path::Refused);
    sim.advance(59.9);
    assert!(sim.plan.is_ready());
    sim.advance(0.2);
    assert!(!sim.plan.is_ready());
}

#[test]
fn name_that_another_host_uses_makes_no_agent_ready() {
    for state in [LockState::None, LockState::Foreign] {
        let mut sim = Sim::start(AUTO);
        sim.handle(Event::Lock(state));
        sim.reject_next();
        sim.reject_next();
        assert!(!sim.plan.is_ready());
        sim.expect_lap(60.0..);
        // The other host's agent is gone, and this one has had the lock for long.
        sim.session(Quic);
    }
}
