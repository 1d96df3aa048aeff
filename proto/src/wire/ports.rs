//! Sets of ports, as users write them.

use std::fmt;
use std::str::FromStr;

use super::name::Port;

/// Ports and port ranges, as in `2379-2381, 10248`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PortSet(Vec<(u16, u16)>);

impl PortSet {
    /// Returns a set of single ports.
    pub fn of(ports: impl IntoIterator<Item = Port>) -> Self {
        let ports = ports.into_iter().map(Port::get);
        Self(ports.map(|port| (port, port)).collect())
    }

    /// Returns the ports of both sets.
    #[must_use]
    pub fn union(mut self, other: &Self) -> Self {
        self.0.extend_from_slice(&other.0);
        self
    }

    /// Returns whether the set contains the port.
    pub fn contains(&self, port: Port) -> bool {
        self.0
            .iter()
            .any(|(low, high)| (*low..=*high).contains(&port.get()))
    }

    /// Returns the ranges as pairs of lowest and highest port.
    pub fn ranges(&self) -> impl Iterator<Item = (u16, u16)> + '_ {
        self.0.iter().copied()
    }

    /// Returns every port. Intended for small sets.
    pub fn ports(&self) -> impl Iterator<Item = Port> + '_ {
        self.0
            .iter()
            .flat_map(|(low, high)| (*low..=*high).filter_map(Port::new))
    }
}

impl FromStr for PortSet {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut ranges = Vec::new();
        for item in text
            .split(',')
            .map(str::trim)
            .filter(|item| !item.is_empty())
        {
            let port = |text: &str| {
                text.trim()
                    .parse::<Port>()
                    .map_err(|error| format!("{item:?}: {error}"))
            };
            let (low, high) = match item.split_once('-') {
                Some((low, high)) => (port(low)?, port(high)?),
                None => (port(item)?, port(item)?),
            };
            if low > high {
                return Err(format!(
                    "{item:?}: the range is reversed; write the lower port first"
                ));
            }
            ranges.push((low.get(), high.get()));
        }
        Ok(Self(ranges))
    }
}

impl fmt::Display for PortSet {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (low, high)) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            if low == high {
                write!(formatter, "{comma}{low}")?
            } else {
                write!(formatter, "{comma}{low}-{high}")?
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_lists_hold_single_ports_and_ranges() {
        let ports: PortSet = "2379-2381, 10248,,".parse().unwrap();
        assert!(ports.contains(Port::new(2380).unwrap()));
        assert!(!ports.contains(Port::new(2382).unwrap()));
        assert_eq!(ports.to_string(), "2379-2381, 10248");
        assert_eq!(ports.ports().count(), 4);
        for text in ["a", "0", "70000", "9-1", "1-", "-1"] {
            assert!(text.parse::<PortSet>().is_err(), "{text:?}");
        }
    }
}
