//! Names in texts for people: the first few, and the number of the others.

use std::fmt::{self, Display, Formatter};

use serde::Serialize;

/// Number of names that a list shows. A refusal or a condition fits into one line with it.
pub const NAMES_SHOWN_MAX: usize = 10;

/// The first [`NAMES_SHOWN_MAX`] names of a list, and how many there are, as in
/// `worker-1, worker-2 and 302 more`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct NameList {
    count: usize,
    #[serde(rename = "names")]
    shown: Vec<String>,
}

impl NameList {
    /// Creates a list of names whose number is known. Reads no name that is not shown.
    pub fn of<N: Display>(names: &[N]) -> Self {
        let shown = names.iter().take(NAMES_SHOWN_MAX);
        Self {
            count: names.len(),
            shown: shown.map(ToString::to_string).collect(),
        }
    }

    /// Adds a name, which is shown if there is room.
    pub fn push(&mut self, name: &(impl Display + ?Sized)) {
        self.count += 1;
        if self.shown.len() < NAMES_SHOWN_MAX {
            self.shown.push(name.to_string());
        }
    }

    /// Returns the number of names, with those that are not shown.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns whether there is no name.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the names that are shown.
    pub fn shown(&self) -> &[String] {
        &self.shown
    }
}

impl<N: Display> FromIterator<N> for NameList {
    fn from_iter<I: IntoIterator<Item = N>>(names: I) -> Self {
        let mut list = Self::default();
        for name in names {
            list.push(&name);
        }
        list
    }
}

impl Display for NameList {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.shown.join(", "))?;
        match self.count - self.shown.len() {
            0 => Ok(()),
            others => write!(formatter, " and {others} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_names_are_shown_and_the_others_counted() {
        for (count, expected) in [
            (0, ""),
            (1, "n0"),
            (2, "n0, n1"),
            (10, "n0, n1, n2, n3, n4, n5, n6, n7, n8, n9"),
            (312, "n0, n1, n2, n3, n4, n5, n6, n7, n8, n9 and 302 more"),
        ] {
            let names: Vec<String> = (0..count).map(|number| format!("n{number}")).collect();
            let list = NameList::of(&names);
            assert_eq!(list.to_string(), expected);
            assert_eq!((list.count(), list.is_empty()), (count, count == 0));
            assert_eq!(names.iter().collect::<NameList>(), list);
        }
    }
}
