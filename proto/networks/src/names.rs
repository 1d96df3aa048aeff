//! Enums whose values have names in settings, logs, metrics or tables, declared once by `named!`.

/// Declares an enum with the names of its values, and the items behind the name of the enum: `ALL`, an
/// array of every value; `label`, which returns the name; `Display`; `FromStr`, whose error lists the
/// names.
#[macro_export]
macro_rules! named {
    (
        $(#[$attribute:meta])*
        $visibility:vis enum $name:ident: $($item:ident),+ {
            $($(#[$variant_attribute:meta])* $variant:ident = $text:literal,)+
        }
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        $visibility enum $name { $($(#[$variant_attribute])* $variant,)+ }

        $crate::named! { @[$($item)+] $visibility $name { $($variant = $text,)+ } }
    };
    (@[$($item:ident)+] $visibility:vis $name:ident $values:tt) => {
        $($crate::named! { @$item $visibility $name $values })+
    };
    (@ALL $visibility:vis $name:ident { $($variant:ident = $text:literal,)+ }) => {
        impl $name {
            /// Every value, in the order of the declaration.
            $visibility const ALL: [Self; [$($text),+].len()] = [$(Self::$variant),+];
        }
    };
    (@label $visibility:vis $name:ident { $($variant:ident = $text:literal,)+ }) => {
        impl $name {
            /// Returns the name of the value.
            $visibility fn label(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }
        }
    };
    (@Display $visibility:vis $name:ident { $($variant:ident = $text:literal,)+ }) => {
        impl std::fmt::Display for $name {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str(match self { $(Self::$variant => $text,)+ })
            }
        }
    };
    (@FromStr $visibility:vis $name:ident { $($variant:ident = $text:literal,)+ }) => {
        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($text => Ok(Self::$variant),)+
                    other => Err($crate::none_of(other, &[$($text),+])),
                }
            }
        }
    };
}

/// Returns the error for a text that is none of these names.
pub fn none_of(text: &str, names: &[&str]) -> String {
    format!("{text:?} is none of {}", names.join(", "))
}

#[cfg(test)]
mod tests {
    crate::named! {
        /// An enum with all items.
        #[derive(Default)]
        enum Fruit: ALL, label, Display, FromStr {
            /// The default.
            #[default]
            Apple = "apple",
            Pear = "pear-tree",
        }
    }

    #[test]
    fn names_are_printed_and_parsed_and_others_refused_with_the_names() {
        assert_eq!(Fruit::ALL, [Fruit::default(), Fruit::Pear]);
        for fruit in Fruit::ALL {
            assert_eq!(fruit.to_string(), fruit.label());
            assert_eq!(fruit.label().parse(), Ok(fruit));
        }
        assert_eq!(Fruit::Pear.label(), "pear-tree");
        let error = "Apple".parse::<Fruit>().unwrap_err();
        assert_eq!(error, "\"Apple\" is none of apple, pear-tree");
    }
}
