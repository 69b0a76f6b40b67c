// What operators do to their arguments, where the schema does not say.
#pragma once

#include <ATen/core/function_schema.h>

#include <string>

namespace sim {

inline bool is_collective(const c10::FunctionSchema& schema) {
  return schema.name().rfind("c10d::", 0) == 0;
}

// c10d marks no argument as written. Its inputs are named so; whatever else it is given, it writes into,
// except for what send() takes.
inline bool writes_argument(const c10::FunctionSchema& schema, size_t argument) {
  auto& arg = schema.arguments()[argument];
  if (is_collective(schema)) {
    return arg.name().rfind("input", 0) != 0 && schema.name() != "c10d::send";
  }
  return arg.alias_info() && arg.alias_info()->isWrite();
}

// Operators after which the host knows that the stream has done its work, because their result is a number on
// the host or has a shape that depends on the values.
bool synchronizes_host(const std::string& name);

// Host operators that take a tensor for its shape, type or storage, not for its values.
bool reads_no_values(const std::string& name);

} // namespace sim
