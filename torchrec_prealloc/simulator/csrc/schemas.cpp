#include "schemas.h"

#include <unordered_set>

namespace sim {
namespace {

bool starts_with(const std::string& text, const char* start) {
  return text.rfind(start, 0) == 0;
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

} // namespace

bool synchronizes_host(const std::string& name) {
  static const std::unordered_set<std::string> names{"aten::_local_scalar_dense",
                                                     "aten::nonzero",
                                                     "aten::masked_select",
                                                     "aten::equal",
                                                     "aten::_unique2",
                                                     "aten::unique_dim",
                                                     "aten::unique_consecutive",
                                                     "aten::is_nonzero"};
  return names.count(name) > 0;
}

bool reads_no_values(const std::string& name) {
  static const std::unordered_set<std::string> names{
      "aten::is_pinned",   "aten::is_same_size", "aten::size",          "aten::stride",
      "aten::numel",       "aten::resize_",      "aten::record_stream", "aten::set_",
      "aten::sym_size",    "aten::sym_stride",   "aten::sym_numel",     "aten::sym_storage_offset",
      "aten::result_type", "aten::can_cast",     "aten::is_complex",    "aten::is_floating_point",
      "aten::is_signed",   "aten::is_conj",      "aten::is_neg",        "aten::broadcast_tensors"};
  return names.count(name) > 0 || ends_with(name, "_like") || ends_with(name, "_as") ||
         starts_with(name, "aten::new_");
}

} // namespace sim
