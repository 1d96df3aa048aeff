//! Which of two agent processes keeps a name that two servers have admitted. Pure. No clock of a
//! machine decides, only how long a server has had the process, and the order of the instance ids.

use tunnel_proto::wire::name::InstanceId;

/// How firmly an agent process has its name at a server, towards one other server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tenure {
    /// The process was admitted so recently that an admission at the other server can have crossed
    /// this one.
    New,
    /// The connection between the two servers is so recent that neither could know of the other's
    /// admission, however old.
    Reconnected,
    /// Neither: the other server has admitted a second process although it could know of this one,
    /// or claims so.
    Settled,
}

/// The process that a server has admitted, towards one other server.
#[derive(Debug, Clone, Copy)]
pub struct Contender {
    pub instance: InstanceId,
    pub tenure: Tenure,
}

impl Contender {
    /// Returns whether the server asks the other server which process keeps the name.
    pub fn asks(self) -> bool {
        match self.tenure {
            Tenure::New | Tenure::Reconnected => true,
            Tenure::Settled => false,
        }
    }

    /// Returns whether the process keeps the name, as the answer to another server that has admitted
    /// `other`.
    pub fn keeps_name(self, other: InstanceId) -> bool {
        match self.tenure {
            Tenure::Settled => true,
            Tenure::New | Tenure::Reconnected => self.instance < other,
        }
    }

    /// Returns whether the server closes the session after the other server has answered that
    /// `other` keeps the name.
    pub fn yields_to(self, other: InstanceId) -> bool {
        match self.tenure {
            Tenure::New => true,
            Tenure::Reconnected => other < self.instance,
            Tenure::Settled => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TENURES: [Tenure; 3] = [Tenure::New, Tenure::Reconnected, Tenure::Settled];

    /// Returns whether a server that has admitted `own` gives the name up, when both servers decide
    /// before either session is closed.
    fn loses(own: Contender, other: Contender) -> bool {
        let after_own_question =
            own.asks() && other.keeps_name(own.instance) && own.yields_to(other.instance);
        let after_other_question = other.asks() && !own.keeps_name(other.instance);
        after_own_question || after_other_question
    }

    /// Both servers see the connection between them alike, but for an instant.
    #[test]
    fn never_both_processes_lose_and_one_of_them_does_while_the_window_is_open() {
        let ids = [1, 2].map(|byte| InstanceId::new([byte; 16]));
        for (one, other) in [(ids[0], ids[1]), (ids[1], ids[0])] {
            for (tenure, other_tenure) in TENURES
                .iter()
                .flat_map(|tenure| TENURES.map(|other_tenure| (*tenure, other_tenure)))
            {
                let one = Contender {
                    instance: one,
                    tenure,
                };
                let other = Contender {
                    instance: other,
                    tenure: other_tenure,
                };
                let lost = [loses(one, other), loses(other, one)];
                assert_ne!(lost, [true, true], "{one:?} {other:?}");
                let both_stay = matches!(
                    (tenure, other_tenure),
                    (Tenure::Settled, Tenure::Settled | Tenure::Reconnected)
                        | (Tenure::Reconnected, Tenure::Settled)
                );
                assert!(both_stay || lost.contains(&true), "{one:?} {other:?}");
            }
        }
    }

    #[test]
    fn settled_process_never_loses() {
        for (byte, tenure) in [0, 2]
            .into_iter()
            .flat_map(|byte| TENURES.map(|tenure| (byte, tenure)))
        {
            let instance = InstanceId::new([1; 16]);
            let own = Contender {
                instance,
                tenure: Tenure::Settled,
            };
            let other = Contender {
                instance: InstanceId::new([byte; 16]),
                tenure,
            };
            assert!(!loses(own, other), "{other:?}");
        }
    }
}
