//! The recipes that come with the program.

/// Name and text of every recipe, the default first.
pub const RECIPES: [(&str, &str); 2] =
    [("quickstart", include_str!("../../recipes/quickstart.toml")), ("smoke", include_str!("../../recipes/smoke.toml"))];

pub fn recipe(name: &str) -> Option<&'static str> {
    RECIPES.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}
