//! Items of a conversation to messages that templates take: what a model wrote in one turn is several items and becomes one message.

use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::openai::messages;
use crate::tokenizer::Json;

/// Most items of a conversation.
const ITEMS_MAX: usize = 20_000;

/// Reads `instructions` and `input`.
///
/// # Errors
/// 400 that names the item and what is wrong with it.
pub(super) fn read(fields: &Fields<'_>) -> Result<Vec<Json>, ApiError> {
    let mut conversation = Conversation::default();
    if let Some(text) = fields.text("instructions")?.filter(|text| !text.is_empty()) {
        conversation.push("system", text.to_owned(), None);
    }
    match fields.get("input") {
        None => return Err(fields.refuse("input", "missing")),
        Some(Json::String(text)) => conversation.push("user", text.clone(), None),
        Some(_) => {
            let items = fields.list("input", ITEMS_MAX)?;
            if items.is_empty() {
                return Err(fields.refuse("input", "the list is empty: give at least one item"));
            }
            for (index, item) in items.iter().enumerate() {
                conversation.item(item, &format!("input[{index}]"))?;
            }
        }
    }
    conversation.end_turn();
    Ok(conversation.messages)
}

#[derive(Default)]
struct Conversation {
    messages: Vec<Json>,
    /// What the model wrote since the last message of another.
    turn: Option<Turn>,
}

#[derive(Default)]
struct Turn {
    reasoning: Vec<String>,
    content: String,
    calls: Vec<Json>,
}

impl Conversation {
    fn item(&mut self, item: &Json, path: &str) -> Result<(), ApiError> {
        let fields = Fields::new(item, path)?;
        // A message may leave its type out.
        let kind = match fields.text("type")? {
            Some(kind) => kind,
            None if fields.get("role").is_some() => "message",
            None => return Err(fields.refuse("type", "missing")),
        };
        match kind {
            "message" => self.message(&fields),
            "function_call" | "custom_tool_call" => {
                let id = needed(&fields, "call_id")?;
                let name = needed(&fields, "name")?;
                let arguments = match fields.text("arguments")?.or(fields.text("input")?) {
                    None => Json::Object(Vec::new()),
                    Some(text) => arguments(text),
                };
                let function = Json::Object(vec![("name".to_owned(), Json::from(name)), ("arguments".to_owned(), arguments)]);
                let entries = [("id", Json::from(id)), ("type", Json::from("function")), ("function", function)];
                let call = Json::Object(entries.map(|(key, value)| (key.to_owned(), value)).into());
                self.turn.get_or_insert_default().calls.push(call);
                Ok(())
            }
            "function_call_output" | "custom_tool_call_output" => {
                let id = needed(&fields, "call_id")?;
                let output = fields.get("output").ok_or_else(|| fields.refuse("output", "missing"))?;
                let text = messages::text_of(output, &fields.path("output"))?;
                self.push("tool", text, Some(id));
                Ok(())
            }
            "reasoning" => self.reasoning(&fields),
            "item_reference" => Err(fields.refuse("type", "nothing is stored here: send the item itself")),
            // What the service's own tools did means nothing to this model.
            "web_search_call" | "file_search_call" | "computer_call" | "image_generation_call" | "code_interpreter_call" => Ok(()),
            other => {
                let other: String = other.chars().take(40).collect();
                Err(fields.refuse("type", &format!("`{other}` is no kind of item that is known")))
            }
        }
    }

    fn message(&mut self, fields: &Fields<'_>) -> Result<(), ApiError> {
        let content = fields.get("content").ok_or_else(|| fields.refuse("content", "missing"))?;
        let text = messages::text_of(content, &fields.path("content"))?;
        match needed(fields, "role")? {
            "assistant" => self.turn.get_or_insert_default().content.push_str(&text),
            "user" => self.push("user", text, None),
            "system" | "developer" => self.push("system", text, None),
            _ => return Err(fields.refuse("role", "none of user, assistant, system, developer")),
        }
        Ok(())
    }

    /// Thoughts that we gave out come back; those that are encrypted are of no use.
    fn reasoning(&mut self, fields: &Fields<'_>) -> Result<(), ApiError> {
        let turn = self.turn.get_or_insert_default();
        for part in fields.list("content", ITEMS_MAX)? {
            if let Some(Json::String(text)) = part.get("text") {
                turn.reasoning.push(text.clone());
            }
        }
        Ok(())
    }

    fn push(&mut self, role: &str, mut content: String, call_id: Option<&str>) {
        self.end_turn();
        // Many templates take one system message, in the first place.
        if let ("system", [Json::Object(only)]) = (role, self.messages.as_slice())
            && only.first().is_some_and(|(_, role)| *role == Json::from("system"))
        {
            if let Some((_, Json::String(before))) = only.get(1) {
                content = format!("{before}\n\n{content}");
            }
            self.messages.clear();
        }
        let mut entries = vec![("role".to_owned(), Json::from(role)), ("content".to_owned(), Json::String(content))];
        entries.extend(call_id.map(|id| ("tool_call_id".to_owned(), Json::from(id))));
        self.messages.push(Json::Object(entries));
    }

    fn end_turn(&mut self) {
        let Some(Turn { reasoning, content, calls }) = self.turn.take() else { return };
        let mut entries = vec![("role".to_owned(), Json::from("assistant")), ("content".to_owned(), Json::String(content))];
        if !reasoning.is_empty() {
            entries.push(("reasoning_content".to_owned(), Json::String(reasoning.join("\n"))));
        }
        if !calls.is_empty() {
            entries.push(("tool_calls".to_owned(), Json::Array(calls)));
        }
        self.messages.push(Json::Object(entries));
    }
}

fn needed<'a>(fields: &Fields<'a>, name: &str) -> Result<&'a str, ApiError> {
    fields.text(name)?.ok_or_else(|| fields.refuse(name, "missing"))
}

/// Arguments of a call as an object; a text that is none stays text, since clients replay what was cut off.
fn arguments(text: &str) -> Json {
    match serde_json::from_str(text) {
        Ok(object @ Json::Object(_)) => object,
        _ if text.trim().is_empty() => Json::Object(Vec::new()),
        _ => Json::from(text),
    }
}
