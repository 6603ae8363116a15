// Indexes of the last lookups, for their backward: it is given the same ids.
#ifndef COMERA_LOOKUP_RECENT_H
#define COMERA_LOOKUP_RECENT_H
#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

namespace comera {

// An index is found by what it was made from, the ids themselves included, so it is right whoever asks. The backward takes
// it out; the oldest goes when a lookup finds no room.
class Recent {
 public:
  template <class I>
  void keep(const Table& table, const I* ids, int64_t count, std::unique_ptr<const Index> index) {
    if (count > MOST_IDS) return;
    const char* bytes = (const char*)ids;
    Entry entry{table, sizeof(I), {bytes, bytes + count * sizeof(I)}, std::move(index)};
    const std::lock_guard<std::mutex> held(mutex_);
    std::swap(entries_[next_++ % entries_.size()], entry);
  }

  // Null if it is not there.
  template <class I>
  std::unique_ptr<const Index> take(const Table& table, const I* ids, int64_t count) {
    const std::lock_guard<std::mutex> held(mutex_);
    for (Entry& entry : entries_)
      if (entry.index && entry.id_bytes == sizeof(I) && entry.ids.size() == count * sizeof(I) &&
          std::memcmp(&entry.table, &table, sizeof(Table)) == 0 &&
          std::memcmp(entry.ids.data(), ids, entry.ids.size()) == 0) {
        Entry found;
        std::swap(found, entry);
        return std::move(found.index);
      }
    return nullptr;
  }

 private:
  static constexpr int64_t MOST_IDS = 1 << 14;  // an index takes about a hundred bytes an id
  struct Entry {
    Table table;
    size_t id_bytes = 0;
    std::vector<char> ids;
    std::unique_ptr<const Index> index;
  };
  std::mutex mutex_;
  std::array<Entry, 8> entries_;
  size_t next_ = 0;
};

inline Recent& recent() {
  static Recent made;
  return made;
}

}  // namespace comera
#endif
