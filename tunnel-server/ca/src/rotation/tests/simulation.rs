//! Rotations of the CA among servers that are silent, stopped, new or partitioned, in a time of the
//! simulation: while nobody uses `--force`, every agent that stays connected and every server that
//! runs accept each other. Operators act by the counts of all servers, and servers ask the agents that
//! are connected to them to renew. Signatures are not checked: a certificate is accepted if its signer is
//! trusted, which is what TLS checks.

use std::ops::Range;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::*;

type Key = [u8; 32];

struct Server {
    id: ReplicaId,
    ca: Arc<LocalCa>,
    /// The keys of the CA, which take long to parse.
    keys: Keys,
    rotator: CaRotator,
    _scratch: Scratch,
}

#[derive(Debug, Clone)]
struct Keys {
    signer: Key,
    trusted: BTreeSet<Key>,
}

/// What a server can do, as the others and its rotator see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Condition {
    is_up: bool,
    /// Whether it follows the Secret. A server that does not cannot read it either.
    has_api: bool,
    has_links: bool,
}

#[derive(Debug)]
struct Agent {
    name: NodeName,
    signer: Key,
    trusted: BTreeSet<Key>,
    issued: SystemTime,
    not_after: SystemTime,
    renew_at: SystemTime,
}

/// The Secret, for one server.
#[derive(Debug)]
struct SecretOfServer {
    secret: Arc<MemorySecret>,
    shared: Shared,
    number: usize,
}

impl CaStore for SecretOfServer {
    fn read(&self) -> Result<SharedCa, CaError> {
        let condition = self.shared.lock()[self.number].1;
        if condition.has_api {
            self.secret.read()
        } else {
            Err(CaError::OtherCa)
        }
    }

    fn replace(
        &self,
        material: Arc<CaMaterial>,
        rotation: Option<&Rotation>,
        version: Option<String>,
    ) -> Result<bool, CaError> {
        self.secret.replace(material, rotation, version)
    }
}

/// The conditions and CAs of all servers.
type Shared = Arc<Mutex<Vec<(ReplicaId, Condition, CaDigest)>>>;

/// The server that has the session of each node.
type Sessions = Arc<Mutex<BTreeMap<NodeName, usize>>>;

struct Simulation {
    random: StdRng,
    now: SystemTime,
    secret: Arc<MemorySecret>,
    shared: Shared,
    sessions: Sessions,
    servers: Vec<Server>,
    agents: Vec<Agent>,
    /// Number of rotations that ended.
    rotations: usize,
}

#[test]
fn rotations_of_four_seeds_cut_no_agent_off() {
    simulate(0..4);
}

#[test]
fn no_agent_is_cut_off_by_a_rotation_without_force() {
    simulate(0..20);
}

#[test]
#[ignore = "takes minutes; make test-all runs it"]
fn no_agent_is_cut_off_by_a_rotation_without_force_with_200_seeds() {
    simulate(0..200);
}

fn simulate(seeds: Range<u64>) {
    let (mut rotations, count) = (0, seeds.clone().count());
    for seed in seeds {
        let mut simulation = Simulation::new(seed);
        for event in 0..120 {
            simulation.advance();
            if let Err(problem) = simulation.check() {
                panic!("seed {seed}, event {event}: {problem}");
            }
        }
        rotations += simulation.rotations;
    }
    // The simulation is not about servers that never get on.
    assert!(rotations > count / 4, "{rotations}");
}

impl Simulation {
    fn new(seed: u64) -> Self {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let material = Arc::new(CaMaterial::generate(now).unwrap());
        let mut simulation = Self {
            random: StdRng::seed_from_u64(seed),
            now,
            secret: Arc::new(MemorySecret::new(material)),
            shared: Arc::default(),
            sessions: Arc::default(),
            servers: Vec::new(),
            agents: Vec::new(),
            rotations: 0,
        };
        for _ in 0..3 {
            simulation.add_server();
        }
        for number in 0..6 {
            let mut agent = Agent {
                name: format!("worker-{number}").parse().unwrap(),
                signer: [0; 32],
                trusted: BTreeSet::new(),
                issued: now,
                not_after: now,
                renew_at: now,
            };
            let random = simulation.random.random();
            let server = &simulation.servers[0];
            agent.renew(&server.keys, server.ca.life(), now, random);
            simulation.agents.push(agent);
        }
        simulation
    }

    fn add_server(&mut self) {
        let number = self.servers.len();
        let (id, scratch): (ReplicaId, _) = (format!("s{number}").parse().unwrap(), Scratch::new());
        let material = self.secret.material();
        let ca = Arc::new(LocalCa::new(material).unwrap());
        let nodes = Arc::new(KnownNodes::open(&scratch.0).unwrap());
        let (shared, sessions) = (self.shared.clone(), self.sessions.clone());
        let observe = move || {
            let shared = shared.lock();
            let (_, own, _) = &shared[number];
            let others = shared.iter().enumerate();
            let others =
                others.filter(|(other, (_, condition, _))| *other != number && condition.is_up);
            let cas = others.map(|(_, (id, condition, digest))| {
                let is_linked = own.has_links && condition.has_links;
                (id.clone(), is_linked.then_some(*digest))
            });
            Surroundings {
                cas: cas.collect(),
                connected: sessions_of(&sessions, number),
                ..Surroundings::default()
            }
        };
        let secret = SecretOfServer {
            secret: self.secret.clone(),
            shared: self.shared.clone(),
            number,
        };
        let rotator = CaRotator::of_secret(ca.clone(), Arc::new(secret), nodes);
        let condition = Condition {
            is_up: true,
            has_api: true,
            has_links: true,
        };
        self.shared
            .lock()
            .push((id.clone(), condition, ca.digest()));
        self.servers.push(Server {
            id,
            keys: keys(&ca),
            ca,
            rotator: rotator.observing(Arc::new(observe)),
            _scratch: scratch,
        });
    }

    fn condition(&self, number: usize) -> Condition {
        self.shared.lock()[number].1
    }

    /// Lets servers follow the Secret.
    fn follow(&mut self) {
        let material = self.secret.material();
        for number in 0..self.servers.len() {
            let condition = self.condition(number);
            let ca = &self.servers[number].ca;
            if condition.is_up && condition.has_api && ca.replace(material.clone()) {
                self.ca_was_replaced(number);
            }
        }
    }

    fn ca_was_replaced(&mut self, number: usize) {
        let server = &mut self.servers[number];
        server.keys = keys(&server.ca);
        self.shared.lock()[number].2 = server.ca.digest();
    }

    fn advance(&mut self) {
        self.follow();
        self.observe();
        let hours = [0, 0, 1, 8, 24, 72][self.random.random_range(0..6)];
        let seconds = self.random.random_range(30..600) + 3600 * hours;
        // Agents renew at their time, which may be in between.
        let until = self.now + Duration::from_secs(seconds);
        loop {
            let due = self.agents.iter().map(|agent| agent.renew_at).min();
            let due = due.filter(|due| *due <= until);
            self.now = due.map_or(until, |due| due.max(self.now));
            self.connect();
            // An agent that no server accepts is found by the check.
            if due.is_none() || self.check().is_err() {
                break;
            }
        }
        self.observe();
        self.happen();
        self.follow();
        self.connect();
    }

    /// Servers observe each other every half minute, so also right before something happens, and ask
    /// the agents for which the stage waits.
    fn observe(&mut self) {
        let mut asked = BTreeSet::new();
        for (number, server) in self.servers.iter().enumerate() {
            if self.condition(number).is_up {
                let poll = Duration::from_secs(self.random.random_range(0..30));
                let at = self.now - poll;
                let _written_later = server.rotator.observe_followers_at(at);
                let due = server.rotator.due_agents_at(at).ok().flatten();
                asked.extend(due.into_iter().flat_map(|(_since, nodes)| nodes));
            }
        }
        self.ask(|name| asked.contains(name));
    }

    /// Connects each agent to a server, at which it renews when that is due.
    fn connect(&mut self) {
        for at in 0..self.agents.len() {
            let up: Vec<_> = (0..self.servers.len())
                .filter(|number| self.condition(*number).is_up)
                .collect();
            let mut number = up[self.random.random_range(0..up.len())];
            let before = self.sessions.lock().get(&self.agents[at].name).copied();
            // Half of the agents stay where they are.
            if let Some(before) = before.filter(|before| up.contains(before))
                && self.random.random_bool(0.5)
            {
                number = before;
            }
            let server = &self.servers[number];
            let (agent, random) = (&mut self.agents[at], self.random.random());
            if !agent.is_accepted(&server.keys) {
                continue;
            }
            self.sessions.lock().insert(agent.name.clone(), number);
            let record = |agent: &Agent| {
                let nodes = &server.rotator.nodes;
                nodes.record_connection(&agent.name, agent.issued, agent.not_after);
            };
            record(agent);
            if agent.renew_at <= self.now {
                agent.renew(&server.keys, server.ca.life(), self.now, random);
                record(agent);
            }
        }
    }

    /// Agents are asked to renew.
    fn ask(&mut self, is_asked: impl Fn(&NodeName) -> bool) {
        let agents = self.agents.iter_mut();
        for agent in agents.filter(|agent| is_asked(&agent.name)) {
            let within = Duration::from_secs(self.random.random_range(0..600));
            agent.renew_at = agent.renew_at.min(self.now + within);
        }
    }

    /// Something happens to a server, or an operator acts.
    fn happen(&mut self) {
        let number = self.random.random_range(0..self.servers.len());
        let up = self
            .shared
            .lock()
            .iter()
            .filter(|(_, condition, _)| condition.is_up)
            .count();
        let change = self.random.random_range(0..16);
        if change == 15 && self.servers.len() < 5 {
            return self.add_server();
        }
        if change == 14 {
            return self.ask(|_name| true);
        }
        if change < 6 {
            let mut shared = self.shared.lock();
            let condition = &mut shared[number].1;
            match change {
                0 if up > 1 => condition.is_up = false,
                1 => condition.has_api = false,
                2 => condition.has_links = false,
                // Everything is well again. A server that starts reads the Secret.
                _ => {
                    *condition = Condition {
                        is_up: true,
                        has_api: true,
                        has_links: true,
                    }
                }
            }
            return;
        }
        let condition = self.condition(number);
        if !condition.is_up || !condition.has_api {
            return;
        }
        self.follow();
        let rotator = &self.servers[number].rotator;
        let is_in_progress = self.secret.rotation.lock().is_some();
        let action = match (is_in_progress, change) {
            (false, _) => Begin,
            (true, 6) => Abort,
            (true, _) => Next,
        };
        let acted = rotator.act_at(action, &self.others(number), self.now);
        if let Ok(status) = acted {
            self.rotations += usize::from(status.in_progress.is_none());
            self.ca_was_replaced(number);
        }
    }

    /// Returns what the other servers answer to one.
    fn others(&self, number: usize) -> OtherAgents {
        let mut others = OtherAgents::default();
        for (other, server) in self.servers.iter().enumerate() {
            let [own, condition] = [number, other].map(|number| self.condition(number));
            if other != number && condition.is_up && condition.has_links && own.has_links {
                let connected = sessions_of(&self.sessions, other);
                let nodes = server.rotator.nodes.snapshot();
                let known = known_certificates(&nodes, &connected, &BTreeSet::new());
                others.add(server.id.clone(), known);
            }
        }
        others
    }

    /// Checks that all agents and servers accept each other.
    fn check(&self) -> Result<(), String> {
        for agent in &self.agents {
            assert!(agent.not_after > self.now, "the agent stays connected");
            for (number, server) in self.servers.iter().enumerate() {
                if self.condition(number).is_up && !agent.is_accepted(&server.keys) {
                    return Err(format!("{} and {} part: {agent:?}", agent.name, server.id));
                }
            }
        }
        Ok(())
    }
}

impl Agent {
    fn is_accepted(&self, server: &Keys) -> bool {
        server.trusted.contains(&self.signer) && self.trusted.contains(&server.signer)
    }

    /// Takes a certificate of a CA, and its roots.
    fn renew(&mut self, ca: &Keys, life: Duration, now: SystemTime, random: f64) {
        (self.signer, self.trusted) = (ca.signer, ca.trusted.clone());
        (self.issued, self.not_after) = (now, now + life);
        // As the agent does.
        self.renew_at = now + life.mul_f64(0.4 + 0.2 * random);
    }
}

fn sessions_of(sessions: &Sessions, number: usize) -> BTreeSet<NodeName> {
    let sessions = sessions.lock();
    let of_server = sessions.iter().filter(|(_, at)| **at == number);
    of_server.map(|(name, _)| name.clone()).collect()
}

fn keys(ca: &LocalCa) -> Keys {
    let roots = ca.roots();
    Keys {
        signer: ca.spki_sha256(),
        trusted: roots
            .iter()
            .map(|root| spki_sha256(root).unwrap())
            .collect(),
    }
}
